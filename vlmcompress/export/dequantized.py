"""Dequantize an FP8 checkpoint to 16 bits, so that it can be quantized in another format.

Weights are codes times scales, rounded to 16 bits, as in the format `bf16`. FP8 has 3 bits of mantissa, so that its error adds
little to that of a second rounding to 4 bits or fewer. Integers of few bits have larger errors and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vlmcompress import models
from vlmcompress.export.convert import convert, written_tensors
from vlmcompress.export.stored import Stored
from vlmcompress.models import Source
from vlmcompress.numerics import label
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import FORMATS

FORMAT = "bf16"


def outline(path: Path) -> Source:
    """The 16-bit model that `write_dequantized` would write, from headers alone. Raises `UserError` for other formats than
    FP8."""
    with models.quiet_transformers():
        stored = Stored.of(path)
    for scheme in dict.fromkeys(stored.schemes.values()):
        if scheme.weights.kind != "float" or scheme.weights.bits != 8:
            raise UserError(
                f"{path} holds weights in {label(scheme)}, but --from-quantized takes only FP8, as rounding codes of few bits "
                "again costs too much; give the 16-bit original"
            )
    stored.require_scales()
    specs = {tensor.name: tensor.spec for tensor in written_tensors(stored, FORMATS.get(FORMAT))}
    config = {key: value for key, value in stored.config.items() if key != "quantization_config"}
    names = models.written_names(stored.names, stored.spec)
    return Source(path, config, stored.spec, stored.meta_model, specs, names, headers=False)


def write_dequantized(path: Path, out: Path, progress: Callable[[int, int], None] | None = None) -> Source:
    """Write the 16-bit model of an FP8 checkpoint to the folder `out`, replacing an earlier one."""
    convert(path, out, FORMAT, overwrite=True, progress=progress)
    return Source.of(out)

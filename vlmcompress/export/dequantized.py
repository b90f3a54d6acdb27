"""A checkpoint in FP8 as the 16-bit model that it stands for, so that it can be quantized in another format.

Weights are codes times scales, rounded to 16 bits, as the format `bf16` stores them. FP8 has 3 bits of mantissa: a second
rounding to 4 bits or fewer adds little to its error. Of integers of few bits it would not, so that these are refused.
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
    """The 16-bit model that `write_dequantized` would make of a checkpoint, from headers alone. Raises `UserError` if
    it is not FP8."""
    with models.quiet_transformers():
        stored = Stored.of(path)
    for scheme in dict.fromkeys(stored.schemes.values()):
        if scheme.weights.kind != "float" or scheme.weights.bits != 8:
            raise UserError(
                f"{path} holds weights in {label(scheme)}, and --from-quantized takes FP8 alone, as rounding codes of few bits "
                "again costs too much; give the 16-bit original"
            )
    specs = {tensor.name: tensor.spec for tensor in written_tensors(stored, FORMATS.get(FORMAT))}
    config = {key: value for key, value in stored.config.items() if key != "quantization_config"}
    names = models.written_names(stored.names, stored.spec)
    return Source(path, config, stored.spec, stored.meta_model, specs, names, headers=False)


def write_dequantized(path: Path, out: Path, progress: Callable[[int, int], None] | None = None) -> Source:
    """Write the 16-bit model of an FP8 checkpoint into the folder `out`, in the place of an earlier one."""
    convert(path, out, FORMAT, overwrite=True, progress=progress)
    return Source.of(out)

"""The exact size of the output, from shapes and the exporter's own tables of what it stores."""

from __future__ import annotations

from collections.abc import Mapping

from vlmcompress.common.tensor_files import Spec
from vlmcompress.errors import UserError
from vlmcompress.exporters import Format
from vlmcompress.models import left_out
from vlmcompress.numerics import Scheme


def output_tensors(
    stored: Mapping[str, Spec],
    schemes: Mapping[str, Scheme],
    names: Mapping[str, str],
    exporter: Format,
    kv_layers: int,
) -> dict[str, Spec]:
    """List every tensor that will be written, under a name of its own.

    Args:
        stored: tensor name on disk -> type and shape, of the source.
        schemes: quantized linear layer (memory name) -> its scheme.
        names: memory name of a parameter -> its name on disk.
        exporter: the format that is written.
        kv_layers: number of attention modules that get scales of keys and values.
    """
    gone = left_out(names, stored)
    specs = {name: spec for name, spec in stored.items() if name not in gone}
    for name, scheme in schemes.items():
        weight = specs.pop(names[f"{name}.weight"])
        try:
            local = exporter.specs(scheme, *weight.shape, weight.dtype)
            specs |= {f"{name}:{key}": spec for key, spec in local.items()}
        except (UserError, ValueError):
            continue  # a shape that the scheme cannot have; the plan reports it
    dtype = next((stored[names[f"{name}.weight"]].dtype for name in schemes), "BF16")
    return specs | {f"kv_cache:{i}": Spec(dtype, (2,)) for i in range(kv_layers)}

"""FP8 W8A8, dynamic (arXiv 2209.05433): float8_e4m3fn weights with a scale per row, activations scaled per token by
the engine.

Needs no data. Halves memory and doubles matrix throughput where the hardware has FP8 units (Ada, Hopper and later). A
float format keeps its relative precision for small values, so outliers hurt far less than with INT8; the loss is near
zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress.numerics import ActFormat, Format, Scheme
from vlmcompress.quantization.schemes._base import QuantizerOptions, no_data, to_nearest

PRESETS: dict[str, dict] = {"FP8_DYNAMIC": {}}


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """No options."""


def scheme(options: Options) -> Scheme:
    """Number formats: float8 weights with a scale per row, float8 activations with one per token."""
    return Scheme(Format("float", 8, -1), ActFormat("float", 8, dynamic=True))


needs, quantize = no_data, to_nearest(scheme)

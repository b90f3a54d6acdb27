"""FP8 W8A8, dynamic (arXiv 2209.05433): float8_e4m3fn weights with a scale per row, activations scaled per token by
the engine.

Needs no data. Halves memory and doubles matrix throughput where the hardware has FP8 units (Ada, Hopper and later). A
float format keeps its relative precision for small values, so outliers hurt far less than with INT8; the loss is near
zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from vlmcompress.numerics import ActFormat, Format, Scheme
from vlmcompress.quantization.schemes._base import Quantizer, QuantizerOptions


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """No options."""


class Fp8(Quantizer[Options]):
    """The scheme `fp8`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"FP8_DYNAMIC": {}}

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: float8 weights with a scale per row, float8 activations with one per token."""
        return Scheme(Format("float", 8, -1), ActFormat("float", 8, dynamic=True))


SCHEME = Fp8()

"""FP8 W8A8 in blocks (DeepSeek-V3, arXiv 2412.19437, section 3.3): float8_e4m3fn weights with a scale for each 128 x 128,
activations with one for each 128 inputs of a token, computed by the engine.

The format of the FP8 checkpoints that DeepSeek and Qwen publish. Needs no data. Next to `fp8`, whose scales are of rows, an
outlier affects 128 columns instead of all inputs of its token; weights are about as accurate, with fewer scales. vLLM fuses
only layers whose outputs are whole blocks, and the kernels are for Hopper and later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from vlmcompress.numerics import ActFormat, Format, Scheme
from vlmcompress.quantization.schemes._base import Quantizer, QuantizerOptions

SIDE = 128


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """No options: kernels require blocks of 128 x 128."""


class Fp8Block(Quantizer[Options]):
    """The scheme `fp8-block`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"FP8_BLOCK": {}}

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: float8 weights with a scale per block, float8 activations with dynamic ones."""
        return Scheme(Format("float", 8, SIDE, rows=SIDE), ActFormat("float", 8, dynamic=True))


SCHEME = Fp8Block()

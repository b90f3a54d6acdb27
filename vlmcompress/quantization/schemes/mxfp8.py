"""MXFP8 W8A8: float8_e4m3fn with a power of two as the scale of each 32 weights, and of each 32 inputs of a token.

The microscaling format of the Open Compute Project. The engine scales inputs itself, and weights are rounded to nearest unless
`rounding` says otherwise (`_rounded`), so it needs no data. Compared with `fp8`, an outlier affects 31 numbers instead of a
row, for 3% more bytes. vLLM 0.32 computes with rounded inputs on Blackwell and in 16 bits on older GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from vlmcompress.numerics import MXFP8, ActFormat, Scheme
from vlmcompress.quantization.schemes import _rounded
from vlmcompress.quantization.schemes._base import QuantizerOptions


@dataclass(frozen=True)
class Options(_rounded.Options):
    """`rounding`: "gptq", "awq" or "rtn"; the rest as in gptq."""

    rounding: str = "rtn"


class MxFp8(_rounded.Rounded[Options]):
    """The scheme `mxfp8`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"MXFP8": {}}
    FORMAT = MXFP8

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: MXFP8 weights and activations."""
        return Scheme(MXFP8, ActFormat("float", 8, dynamic=True, mx=True))


SCHEME = MxFp8()

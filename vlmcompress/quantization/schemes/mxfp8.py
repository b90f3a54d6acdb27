"""MXFP8 W8A8: float8_e4m3fn with a power of two as the scale of each 32 weights, and of each 32 inputs of a token.

The microscaling format of the Open Compute Project. The engine scales inputs itself, and weights are rounded to nearest unless
`rounding` says otherwise (`_rounded`), so it needs no data. Compared with `fp8`, an outlier affects 31 numbers instead of a
row, for 3% more bytes. vLLM 0.32 computes with rounded inputs on Blackwell and in 16 bits on older GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress.numerics import MXFP8, ActFormat, Scheme
from vlmcompress.quantization.schemes import _rounded

PREPARED_BY = _rounded.PREPARED_BY
PRESETS: dict[str, dict] = {"MXFP8": {}}


@dataclass(frozen=True)
class Options(_rounded.Options):
    """`rounding`: "gptq", "awq" or "rtn"; the rest as in gptq."""

    rounding: str = "rtn"


_METHOD = _rounded.Rounded(MXFP8)
needs, smooth, prepare, sketch = _METHOD.needs, _METHOD.smooth, _METHOD.prepare, _METHOD.sketch
quantize, quantize_group = _METHOD.quantize, _METHOD.quantize_group


def scheme(options: Options) -> Scheme:
    """Number formats: MXFP8 weights and activations."""
    return Scheme(MXFP8, ActFormat("float", 8, dynamic=True, mx=True))

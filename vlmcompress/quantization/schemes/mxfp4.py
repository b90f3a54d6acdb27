"""MXFP4: 4-bit floats with a power of two as the scale of each 32 weights, the microscaling format of the Open Compute Project.

Next to NVFP4 it has half as many scales, 4.25 instead of 4.5 bits a weight, and they fit worse: a block's largest value is
anywhere between 3.5 and 7 steps, and values above 6 are clipped. The best of three powers of two is used. Weights are rounded
in one of three ways (`_rounded`).

With `activations: 4` (W4A4) the engine rounds inputs the same way, token by token, without calibration; `16` does not round
them. vLLM 0.32 ignores the difference: on Blackwell it always rounds inputs, and on older GPUs it never does and computes in
16 bits. This was not run on such a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress.numerics import MXFP4, ActFormat, Scheme
from vlmcompress.quantization.schemes import _rounded

PREPARED_BY = _rounded.PREPARED_BY
_INPUTS = {4: ActFormat("float", 4, dynamic=True, mx=True), 16: None}
PRESETS: dict[str, dict] = {"MXFP4": {"activations": 4}, "MXFP4A16": {"activations": 16}}


@dataclass(frozen=True)
class Options(_rounded.WithSteps):
    """`rounding`: "gptq", "awq" or "rtn"; `activations`: 4 (MXFP4) or 16 bits; the rest as in gptq-plus."""

    activations: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.activations) is not int or self.activations not in _INPUTS:
            raise ValueError(f"activations must be 4 or 16, got {self.activations!r}")


_METHOD = _rounded.Rounded(MXFP4)
needs, smooth, prepare, sketch = _METHOD.needs, _METHOD.smooth, _METHOD.prepare, _METHOD.sketch
quantize, quantize_group = _METHOD.quantize, _METHOD.quantize_group


def scheme(options: Options) -> Scheme:
    """Number formats: MXFP4 weights; MXFP4 or 16-bit activations."""
    return Scheme(MXFP4, _INPUTS[options.activations])

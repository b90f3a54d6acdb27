"""MXFP4: 4-bit floats with a power of two as the scale of each 32 weights, the microscaling format of the Open Compute Project.

Next to NVFP4 it has half as many scales, 4.25 instead of 4.5 bits a weight, and they fit worse: a block's largest value is
anywhere between 3.5 and 7 steps, and values above 6 are clipped. The best of three powers of two is used. Weights are rounded
in one of three ways (`_rounded`).

With `activations: 4` (W4A4) the engine rounds inputs the same way, token by token, without calibration; `16` does not round
them. vLLM 0.32 ignores the difference: on Blackwell it always rounds inputs, and on older GPUs it never does and computes in
16 bits. This was not run on such a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from vlmcompress.numerics import MXFP4, ActFormat, Scheme
from vlmcompress.quantization.schemes import _rounded
from vlmcompress.quantization.schemes._base import QuantizerOptions

_INPUTS = {4: ActFormat("float", 4, dynamic=True, mx=True), 16: None}


@dataclass(frozen=True)
class Options(_rounded.WithSteps):
    """`rounding`: "gptq", "awq" or "rtn"; `activations`: 4 (MXFP4) or 16 bits; the rest as in gptq-plus."""

    activations: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.activations) is not int or self.activations not in _INPUTS:
            raise ValueError(f"activations must be 4 or 16, got {self.activations!r}")


class MxFp4(_rounded.Rounded[Options]):
    """The scheme `mxfp4`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"MXFP4": {"activations": 4}, "MXFP4A16": {"activations": 16}}
    FORMAT = MXFP4

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: MXFP4 weights; MXFP4 or 16-bit activations."""
        return Scheme(MXFP4, _INPUTS[options.activations])


SCHEME = MxFp4()

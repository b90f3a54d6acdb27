"""W4A8 with FP8 activations: integer weights of 4 bits in groups of 128, activations in float8_e4m3fn with a scale per token.

compressed-tensors' preset W4AFP8, for vLLM's CUTLASS kernel on Hopper: the memory of 4-bit weights and the arithmetic of FP8.
Weights are rounded in one of three ways (`_rounded`); the engine scales activations, so they need no calibration.

That kernel takes no 16-bit group scales: when vLLM loads the weights it converts each scale to float8, relative to the largest
of its row (`kernels/linear/mixed_precision/cutlass.py`), which changes it by up to 6%. So scales are converted the same way
before codes are computed with them, and the codes fit what the kernel computes. The 16-bit numbers in the file are within 0.4%
of those scales and convert to the same float8 again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import FLOAT8, FLOAT8_MAX, ActFormat, Format, Scheme
from vlmcompress.quantization.schemes import _rounded
from vlmcompress.quantization.schemes._base import QuantizerOptions

GROUP = 128  # the only group size that the kernel supports
_LEAST = 2.0**-9  # smallest positive float8


@dataclass(frozen=True)
class Options(_rounded.WithSteps):
    """`rounding`: "gptq", "awq" or "rtn"; the rest as in gptq-plus."""


class W4A8Fp8(_rounded.Rounded[Options]):
    """The scheme `w4a8-fp8`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"W4AFP8": {}}
    FORMAT = Format("int", 4, GROUP)

    @override
    def kept(self, scale: Tensor) -> Tensor:
        """Round scales `[out, n_groups]` to the kernel's values, float8 relative to the row's largest; keeps their dtype."""
        # `convert_bf16_scales_to_fp8` in vLLM: the row's largest scale becomes 448 / 8 = 56; a code times it stays in float8.
        of_row = scale.float().amax(1, keepdim=True) / (FLOAT8_MAX / 8)
        return ((scale.float() / of_row).to(FLOAT8).float().clamp_min_(_LEAST) * of_row).to(scale.dtype)

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: symmetric 4-bit integer weights in groups, float8 activations with a scale per token."""
        return Scheme(self.FORMAT, ActFormat("float", 8, dynamic=True))


SCHEME = W4A8Fp8()

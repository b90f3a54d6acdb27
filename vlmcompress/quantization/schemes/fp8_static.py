"""FP8 W8A8, static (arXiv 2209.05433): float8_e4m3fn with one scale per weight matrix and one calibrated scale for
its input.

    input_scale = max|X| / 448        weight_scale = max|W| / 448

The engine need not compute a maximum per token as for `fp8`, and can fuse the conversion into the operation before. Loses:
inputs above the calibrated maximum saturate, and small values lose precision when a few tokens are huge, as image tokens can
be.

Engines fuse q/k/v and gate/up into one matrix. vLLM then takes the largest weight scale and *rounds again* to it; to avoid
that second rounding, the layers of a group share one scale from the start. `weights: channel` gives a scale per row, a little
more accurate. vLLM 0.32 runs static inputs on CUDA only; its CPU build fails at the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import (
    FLOAT8_MAX,
    ActFormat,
    Format,
    QTensor,
    Scheme,
    find_params,
    quantize_with,
    round_to_nearest,
)
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`weights`: "tensor" (one scale per group of matrices) or "channel" (one per row)."""

    weights: str = "tensor"

    def __post_init__(self) -> None:
        if self.weights not in ("tensor", "channel"):
            raise ValueError(f"weights must be 'tensor' or 'channel', got {self.weights!r}")


class Fp8Static(Quantizer[Options]):
    """The scheme `fp8-static`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"FP8": {"weights": "tensor"}}

    @override
    def needs(self, options: Options) -> Needs:
        """The largest magnitude of each input channel."""
        return Needs(frozenset({"absmax"}))

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: float8 weights, float8 activations with a fixed scale."""
        return Scheme(
            Format("float", 8, 0 if options.weights == "tensor" else -1), ActFormat("float", 8, dynamic=False)
        )

    @override
    def prepare(
        self, weights: list[Tensor], stats: GroupStats, options: Options, factorization: None = None
    ) -> Tensor | None:
        """The largest absolute weight of the group, `[1]`; None with a scale per row."""
        if options.weights == "channel":
            return None
        return torch.stack([weight.abs().max().float() for weight in weights]).max().view(1)

    @override
    def quantize(
        self,
        weight: Tensor,
        stats: GroupStats,
        options: Options,
        scale_dtype: torch.dtype,
        prepared: Tensor | None = None,
    ) -> QTensor:
        """Round `weight [out, in]` to nearest, with the scale of its group if `prepared` has the group's maximum."""
        fmt = self.scheme(options).weights
        if prepared is None:
            return round_to_nearest(weight, fmt, scale_dtype=scale_dtype)
        # The scale of a matrix whose only element is the group's largest weight.
        scale, _ = find_params(prepared.view(1, 1), fmt, scale_dtype=scale_dtype)
        return quantize_with(weight, scale, None, fmt)

    @override
    def input_scale(self, stats: GroupStats, options: Options) -> Tensor:
        """The scale `[1]`, float32, that covers inputs of every modality; 1 if they were always zero."""
        top = stats.absmax().max().view(1)
        return torch.where(top > 0, top / FLOAT8_MAX, 1.0)


SCHEME = Fp8Static()

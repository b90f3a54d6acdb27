"""INT8 W8A8 with SmoothQuant (arXiv 2211.10438): weights per row, activations per token (by the engine), outliers
moved first.

A few input channels of transformers are 10 to 100 times larger than the rest, and one scale per token then leaves
little for the others. Dividing each input channel by `s` and multiplying the weights' columns by it changes nothing in exact
arithmetic and moves part of the range into the weights, which are easier to quantize (eq. 4):

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

The maxima are over calibration tokens, and over all rows of all layers that share the input. With a `balance`, max|X_j| is the
weighted mean of the modalities' maxima, so no modality alone determines a channel's scale.

A row's scale maps its largest weight to code 127 or -128, whichever gives the smaller sum over columns of `max|X_j / s_j|^2`
times the squared rounding error. Smoothed columns are uneven, and an unweighted sum is often worse than the paper's 127 for
every row. Costs a few passes over the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import ActFormat, Format, QTensor, Scheme, round_to_nearest
from vlmcompress.numerics.statistics.balance import require_balance
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions, Smoothing

_LARGEST = 1e5  # largest scale, its reciprocal is the smallest; as in the authors' code, so that quotients fit 16 bits


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`alpha`: how much of the range moves from activations to weights; 0.5 balances, 0.8 suits strong outliers;
    `balance`: see `vlmcompress.numerics.statistics.balance`."""

    alpha: float = 0.5
    balance: Any = "off"

    def __post_init__(self) -> None:
        object.__setattr__(self, "balance", require_balance(self.balance))
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be a number from 0 to 1, got {self.alpha!r}")


class Int8(Quantizer[Options]):
    """The scheme `int8`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"W8A8": {}, "INT8": {}}

    @override
    def needs(self, options: Options) -> Needs:
        """The largest magnitude of each input channel."""
        return Needs(frozenset({"absmax"}))

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: symmetric 8-bit integers, weights with a scale per row, activations with one per token."""
        return Scheme(Format("int", 8, -1), ActFormat("int", 8, dynamic=True))

    @override
    def smooth(
        self, weights: list[Tensor], stats: GroupStats, options: Options, scale_dtype: torch.dtype = torch.bfloat16
    ) -> Smoothing:
        """Compute SmoothQuant's scale `[in]`. A channel that was never active keeps scale 1. One whose weights are all zero
        gets the largest scale, so that an unused input does not determine a token's step."""
        # Eq. (4). Maxima over tokens, and over the rows of all layers that read the input: [in].
        x = stats.absmax()
        w = torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0)
        s = x.pow(options.alpha) / w.pow(1 - options.alpha)
        return Smoothing(torch.where(x > 0, torch.where(w > 0, s.clamp(1e-5, _LARGEST), _LARGEST), 1.0))

    @override
    def quantize(
        self, weight: Tensor, stats: GroupStats | None, options: Options, scale_dtype: torch.dtype, prepared: Any = None
    ) -> QTensor:
        """Round the smoothed `weight [out, in]` to nearest."""
        importance = None
        if stats is not None:  # never 0: a channel without input in calibration may get some later
            importance = stats.absmax().square().clamp_min(torch.finfo(torch.float32).tiny)
        return round_to_nearest(weight, self.scheme(options).weights, scale_dtype=scale_dtype, importance=importance)


SCHEME = Int8()

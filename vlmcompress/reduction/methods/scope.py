"""SCOPE: salient tokens that cover tokens not yet covered by the chosen ones (arXiv 2510.24214).

The coverage of a token is its largest cosine with a kept token, at least 0. Greedy, as published: each step keeps the token
with the largest gain times `saliency^alpha`, where the gain is the increase of the coverage summed over all tokens.
`alpha=0` uses coverage only, a large one saliency only. Unlike `coverage` it uses plain cosines, not their softmax.

Saliency is the attention from CLS in the layer whose output is used, as in the paper. Only LLaVA's CLIP provides it here; in
other families, whose encoders have no CLS or are not hooked by this package, all tokens are equally salient and only coverage
counts. The published code compares outputs of the encoder; here they are projected features, which every family has, so the
kept tokens may differ from that code's.

Two tokens that cover only each other have equal gains. Gains within `SLACK` of the largest count as ties, as rounding would
decide otherwise.

Costs `n^2 d` multiply-adds for the cosines, `8 n^2` bytes, and at most `n^2` additions for each token kept, on a CPU a part of
that (`_selecting.lazily`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmcompress.reduction.methods._base import Reduction, Signals, unit
from vlmcompress.reduction.methods._selecting import SelectingOptions, cover, selected

STAGE = "projected"
NEEDS = frozenset({"features"})
OPTIONAL = frozenset({"saliency"})
COUNT = "fixed"
SERVED = True
BATCHED = True
SLACK = 1e-4
"""Relative difference of gains up to which they count as ties; the lower index wins."""


@dataclass(frozen=True)
class Options(SelectingOptions):
    """`keep`: share of the tokens; `alpha`: power of the saliency, 1 as published, 0 to ignore it."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if not number or not 0 <= self.alpha <= 100:
            raise ValueError(f"alpha must be a number from 0 to 100, got {self.alpha!r}")


def reduce(signals: Signals, options: Options) -> Reduction:
    """Keep the tokens of largest gain times saliency."""
    assert signals.features is not None
    # gain_i * saliency_i^alpha is what a step maximizes; without a saliency all weights are 1.
    weight = None if signals.saliency is None else emphasis(signals.saliency, options.alpha)
    kept = select(signals.features, weight, options.budget(signals.grid))
    return selected(kept, signals, options)


def emphasis(saliency: Tensor, alpha: float) -> Tensor:
    """`saliency [n]` over its largest value, to the power `alpha`; undivided, the power may underflow in float32."""
    wide = saliency.float()
    return (wide / wide.amax().clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=0) ** alpha


def select(features: Tensor, weight: Tensor | None, count: int) -> Tensor:
    """Choose `count` of rows `[n, d]`, whose gains count `weight [n]` times; indices in the order of their choice."""
    rows = unit(features)
    # The maxima of `cover` begin at 0, so tokens that point away from each other cover nothing.
    return cover(rows @ rows.T, count, weight, SLACK)

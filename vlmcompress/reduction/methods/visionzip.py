"""VisionZip: keep the tokens that CLS attends to and merge the rest into a few contextual tokens (arXiv 2412.04467).

The dominant tokens are those with the highest `saliency` (attention from CLS, in the layer whose output is used;
encoders without CLS: the mean over all tokens). Of the rest, every s-th is a target, s = max(1, rest // contextual),
and each other one goes to the target with the most similar key (mean over heads, cosine).

As published a contextual token is *target + mean of those that went to it*: a sum of two, about twice as long as a token.
Deviations: outputs are in raster order where the published code appends the contextual ones, and CLS itself, which has no
position in the grid, is not kept, so that one more patch is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from vlmcompress.reduction.methods._base import Reduction, ShareReducer, Signals, top, unit

CONTEXTUAL = 10 / 64
"""Share of merged tokens among the kept ones, as published."""


@dataclass(frozen=True)
class VisionZip(ShareReducer):
    """`keep`: share of the tokens."""

    STAGE = "encoder"
    NEEDS = frozenset({"saliency", "keys", "heads"})
    NO_BETTER_THAN = "random"

    keep: float = 1 / 3

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep dominant tokens as they are, and merge the rest or, without contextual tokens, drop it."""
        assert signals.saliency is not None and signals.keys is not None and signals.heads is not None
        n, device = signals.n, signals.saliency.device
        count = self.budget(signals.grid)
        contextual = min(math.floor(CONTEXTUAL * count + 0.5), count - 1)
        # Dominant tokens: the most attended ones.
        dominant = torch.zeros(n, dtype=torch.bool, device=device)
        dominant[top(signals.saliency, count - contextual)] = True
        if contextual == 0 or count == n:
            return Reduction.keep(top(dominant, count) if count < n else torch.arange(n, device=device), n)
        rest = top(~dominant, n - count + contextual)
        # Contextual tokens: a uniform sample of the rest, in raster order.
        targets = rest[:: max(1, len(rest) // contextual)][:contextual]
        rows = unit(signals.keys.float().view(n, signals.heads, -1).mean(1))
        parent = torch.arange(n, device=device)
        # [rest, contextual] cosines of keys; each of the rest joins its most similar target.
        parent[rest] = targets[(rows[rest] @ rows[targets].T).argmax(1)]
        parent[targets] = targets
        joined = Reduction.join(parent, count=count)
        # The mean of the tokens merged into a target is added to the target (twice the mean of the two).
        guests = joined.sizes - 1
        weight = 1 / guests[joined.target].clamp(min=1)  # a target and the mean of its merged tokens have equal weight
        weight.index_fill_(0, joined.anchor, 1.0)
        return replace(joined, weight=weight, scale=torch.where(guests > 0, 2.0, 1.0))


REDUCER = VisionZip()

"""After DART (arXiv 2502.11494), on the projected tokens: pivots, by default 80% of the kept tokens, and the tokens least
similar to them.

Selects by duplication, not importance. The pivots are the tokens with the largest L1 norm; each pivot in turn adds the
remaining tokens with the lowest cosine to it. Needs no attention map, so it works with any attention kernel.

The published DART works within the language model, whose states engines do not expose between layers (`dart-llm` is that
form); this is the same rule on the inputs of the language model, as TensorRT Edge-LLM serves it, with the norm of the rows
instead of the keys. With the published four pivots this loses more than a random choice, because tokens of large norm are few
and similar, and the tokens least similar to them are background. So by default 80% of the kept tokens are pivots, a share
chosen on the demo models' validation questions; `pivots=4` is the published number. The published text pivots are only in
`dart-llm`, so that an image's result serves every question. Two choices that the paper leaves open are fixed here. Pivots take
turns in order of decreasing norm; the published code iterates over a Python set, so it selects the same tokens only if that
has the same order. And the count is exactly the budget: the first turns take one token more when the picks do not divide,
where the code's count is 4 + 8 floor(keep n / 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Reduction, Signals, require_whole, top, unit
from vlmcompress.reduction.methods._selecting import SelectingReducer

LED = 0.8
"""Share of the kept tokens that are pivots, where `pivots` is 0."""


@dataclass(frozen=True)
class Dart(SelectingReducer):
    """`keep`: share of the tokens; `pivots`: number of image pivots, 0 for 80% of the kept tokens."""

    STAGE = "projected"
    NEEDS = frozenset({"features"})
    BATCHED = True

    pivots: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("pivots", self.pivots)

    @property
    @override
    def by_channel(self) -> bool:
        """A rotation changes a row's L1 norm, unlike its length and angles."""
        return True

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep pivots, the tokens with the largest L1 norm of the features, and those least similar to them."""
        assert signals.features is not None
        count = self.budget(signals.grid)
        # Pivots: largest L1 norm, of the rows here, of the keys in the paper; float32, as thousands of channels add up.
        lead = top(signals.features.float().abs().sum(-1), self.pivots or max(1, round(LED * count)))
        return self.selected(select(signals.features, signals.features[:0], lead, count), signals)


def select(features: Tensor, query: Tensor, pivots: Tensor, count: int) -> Tensor:
    """Select `count` tokens; returns their indices.

    Args:
        features: `[n, d]` tokens of the image.
        query: `[q, d]` text pivots in the order of their turns.
        pivots: `[p]` indices of the image's pivots in the order of their turns.
        count: number of tokens to keep; with fewer than `p`, the first pivots.
    """
    # With a budget below the number of pivots only the first of them are kept.
    pivots = pivots[:count]
    rows = unit(features)
    likeness = torch.cat([rows[pivots], unit(query.to(features.device))]) @ rows.T  # [p + q, n] cosines
    offset = torch.zeros_like(likeness[0]).scatter(0, pivots, torch.inf)  # what is added to cosines
    picks, turns, chosen = count - len(pivots), len(likeness), [pivots]
    for turn, cosine in enumerate(likeness[:picks]):  # with fewer picks than turns the later ones get none
        quota = picks // turns + (turn < picks % turns)
        # Tokens that are taken are infinitely similar, so `argmin` never takes them again.
        free = cosine + offset
        # The least similar tokens, which add the most to the pivot.
        picked = free.argmin(0, keepdim=True) if quota == 1 else free.sort(stable=True).indices[:quota]
        offset = offset.scatter(0, picked, torch.inf)
        chosen.append(picked)
    return torch.cat(chosen)


REDUCER = Dart()

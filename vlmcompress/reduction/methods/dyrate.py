"""A training-free stand-in for DyRate: drops visual tokens during generation as attention to them falls (after arXiv
2501.14204).

DyRate observes that attention to visual tokens falls as the answer grows, and trains a small predictor that sets the rate of
each step from the attention's distribution. The predictor is not public; here the rate is the visual attention mass itself,

    rate_t = clip(factor * sum(saliency_t), LEAST, 1) tokens after step t: rate_t of the image's, never more than before

which is not the paper's method; its results do not carry over. `saliency` is the attention of the newest token to the
remaining tokens, `merged` identifies them; the most attended stay. Dropped tokens never come back, even if attention rises
later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from vlmcompress.reduction.methods._base import LEAST_SHARE, Grid, Reducer, Reduction, Signals, require_number, top

LEAST = 0.1
"""Share of an image's tokens that always stays."""


@dataclass(frozen=True)
class DyRate(Reducer):
    """`factor`: share of the tokens for each unit of attention on them; `layer`: number of the decoder block, from 0, whose
    input is reduced."""

    STAGE = "llm"
    NEEDS = frozenset({"saliency"})
    COUNT = "adaptive"
    SERVED = False
    WHY_NOT = "it drops tokens while generating, from caches that engines do not open"

    factor: float = 2.0
    layer: int = 2

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("factor", self.factor, LEAST_SHARE, 1e6)

    @override
    def budget(self, grid: Grid) -> None:
        """Return None: the number of kept tokens is not known in advance."""
        return None

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the most attended of the tokens left before this step."""
        assert signals.saliency is not None
        # float64, as the sum of thousands of small attentions decides on a count. The host has to know it: this waits.
        rate = min(1.0, max(LEAST, self.factor * signals.saliency.double().sum().item()))
        return Reduction.keep(top(signals.saliency, math.ceil(rate * math.prod(signals.grid))), signals.n)


REDUCER = DyRate()

"""Coverage: tokens that represent all tokens best, a facility location problem (after MMTok, arXiv 2508.18264).

Token j represents token i with the score `s_ij = softmax_j(cos(x_i, x_j) / TEMPERATURE)`. The kept tokens maximize the sum
over all tokens i of the largest `s_ij` among the kept j. The sum is submodular, so the greedy choice of the token that adds
most reaches at least 1 - 1/e of the optimum (Nemhauser, Wolsey and Fisher, 1978). Unlike `divprune`, it prefers a token
similar to many others to an outlier. MMTok also covers the question's words; here the question is ignored, so an image's
result can be reused for other questions. Cosines are those of projected rows, while MMTok uses the encoder's.

Costs `n^2 d` multiply-adds for the cosines, `8 n^2` bytes, and at most `n^2` additions for each token kept, on a CPU a part of
that (`_selecting.lazily`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Reduction, Signals, unit
from vlmcompress.reduction.methods._selecting import SelectingReducer, cover

TEMPERATURE = 0.2
"""Temperature of the softmax; the lower, the more similar a representative must be."""


@dataclass(frozen=True)
class Coverage(SelectingReducer):
    """`keep`: share of the tokens."""

    STAGE = "projected"
    NEEDS = frozenset({"features"})
    BATCHED = True

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the tokens that represent all of them best."""
        assert signals.features is not None
        return self.selected(cover(represented(signals.features), self.budget(signals.grid)), signals)


def represented(rows: Tensor) -> Tensor:
    """How well row j of `rows [n, d]` represents row i, `[n, n]`, each row's sum 1."""
    rows = unit(rows)
    # [n, n], row i: shares of the tokens that represent token i.
    return (rows @ rows.T / TEMPERATURE).softmax(1)


REDUCER = Coverage()

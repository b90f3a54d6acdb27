"""CDPruner: a diverse set of tokens by a determinantal point process (arXiv 2506.10967).

The kernel is `L_ij = cos(x_i, x_j)`. A set's score is the determinant of its submatrix of L: the squared volume that
its tokens' directions span. Greedy, as published: each step takes the token that multiplies the determinant most, computed
with one row of a Cholesky factor per kept token (Chen, Zhang and Zhou, 2018, arXiv 1709.05135).

This is the unconditional process, so an image's result serves every question. The paper's is conditional: it multiplies rows
and columns of L by each token's relevance to the question, from CLIP's text encoder, which checkpoints of vision-language
models do not include. OpenVINO's pipeline has this method alone.

The published determinant is 0 if there are more tokens than dimensions, or duplicates, and rounding then decides. Here
`DIAGONAL` is added to the kernel's diagonal, as if every token also had a component in its own dimension, so selection
continues with the tokens that are least spanned. All tokens score the same at first, so the lowest index is chosen first.

Costs `n^2 d` multiply-adds for the cosines, `n m^2 / 2` for m tokens kept, and `4 n (n + m)` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Reduction, Signals, unit
from vlmcompress.reduction.methods._selecting import SelectingReducer

DIAGONAL = 1e-3
"""Added to the kernel's diagonal, whose entries are 1."""


@dataclass(frozen=True)
class CDPruner(SelectingReducer):
    """`keep`: share of the tokens."""

    STAGE = "projected"
    NEEDS = frozenset({"features"})

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the set of tokens of large determinant."""
        assert signals.features is not None
        return self.selected(select(signals.features, self.budget(signals.grid)), signals)


def select(features: Tensor, count: int) -> Tensor:
    """Choose `count` of rows `[n, d]`; returns their indices in the order in which they are chosen."""
    rows = unit(features)
    kernel = rows @ rows.T
    # The part of each token's squared length that the chosen ones do not span; exactly equal at first, so that rounding
    # does not choose the first token.
    left = (rows != 0).any(1).float() + DIAGONAL
    lowest = torch.full_like(left, DIAGONAL)
    factor = kernel.new_zeros(count, len(rows))
    chosen = torch.empty(count, 1, dtype=torch.int64, device=kernel.device)
    for i, token in enumerate(chosen):
        torch.argmax(left, 0, keepdim=True, out=token)
        # The next row of the factor: the token's row minus the contributions of earlier rows, divided by the root of its
        # residual.
        rest = kernel.index_select(0, token)[0] - factor[:i].index_select(1, token)[:, 0] @ factor[:i]
        row = torch.div(rest, left.gather(0, token).sqrt_(), out=factor[i])
        lowest.scatter_(0, token, -torch.inf)  # together with the next line: a chosen token is not chosen again
        # Chen, Zhang and Zhou, algorithm 1: d_i^2 <- d_i^2 - e_i^2, with e the new row. d_i^2 is the factor by which i
        # multiplies the determinant.
        left = torch.maximum(left.scatter(0, token, -torch.inf) - row.square(), lowest)
    return chosen[:, 0]


REDUCER = CDPruner()

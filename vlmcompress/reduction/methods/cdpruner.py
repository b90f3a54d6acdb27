"""CDPruner: tokens that differ, by a determinantal point process (arXiv 2506.10967).

The kernel is `L_ij = cos(x_i, x_j)`. A set is worth the determinant of its part of L: the squared volume that its tokens'
directions span. Greedy, as published: always the token that multiplies the determinant most, found by one row of a Cholesky
factor for each token kept (Chen, Zhang and Zhou, 2018).

This is the plain process, and an image's result serves every question. The paper's is conditional: it multiplies rows and
columns of L by each token's relevance to the question, from CLIP's text encoder, which checkpoints of language models do not
have.

The published determinant is 0 for more tokens than directions and for copies, and rounding then decides. Here every token has
a direction of its own besides, `OWN` of its squared length, so the choice goes on among those that are least spanned. All
tokens are worth the same at first, and the lowest index leads.

Costs `n^2 d` multiply-adds for the cosines, `n m^2 / 2` for m tokens kept, and `4 n (n + m)` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmcompress.reduction.methods._base import Grid, Reduction, Signals, share, unit
from vlmcompress.reduction.methods._selecting import SelectingOptions, selected

STAGE = "projected"
NEEDS = frozenset({"features"})
COUNT = "fixed"
SERVED = True
BATCHED = True
OWN = 1e-3
"""What is added to the kernel's diagonal, whose entries are 1."""


@dataclass(frozen=True)
class Options(SelectingOptions):
    """`keep`: share of the tokens."""


def budget(grid: Grid, options: Options) -> int:
    """Number of tokens to keep: the share `keep`."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Keep the set of tokens of large determinant."""
    assert signals.features is not None
    return selected(select(signals.features, budget(signals.grid, options)), signals, options)


def select(features: Tensor, count: int) -> Tensor:
    """Choose `count` of rows `[n, d]`; returns their indices in the order in which they are chosen.

    `left` is what of each token's squared length the chosen ones do not span, never less than `OWN`.
    """
    rows = unit(features)
    kernel = rows @ rows.T
    left = (rows != 0).any(1).float() + OWN  # exactly alike, so that rounding does not choose the first token
    free, factor, chosen = torch.ones_like(left), torch.zeros_like(kernel[:count]), []
    for i in range(count):
        token = (free * left).argmax(0, keepdim=True)
        chosen.append(token)
        free = free.scatter(0, token, -torch.inf)
        before = factor[:i]
        rest = kernel.index_select(0, token)[0] - before.index_select(1, token)[:, 0] @ before
        row = rest / left.index_select(0, token).sqrt()
        factor[i] = row
        left = (left - row.square()).clamp(min=OWN)
    return torch.cat(chosen)

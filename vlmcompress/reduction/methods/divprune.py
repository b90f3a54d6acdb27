"""DivPrune: the tokens that are farthest apart (arXiv 2503.02175), max-min diversity by cosine distance.

Greedy, as published: first the token whose nearest neighbour is farthest, then always the token whose nearest kept one
is farthest. The smallest distance among those kept is at least half the best possible one (as chords; a quarter, as 1 -
cosine). Whatever is rare stays, also when it does not matter. Costs `n^2 d` multiply-adds, `4 n^2` bytes and one step
for each token kept. Unlike the published code, a token is never chosen twice when only duplicates are left, so the
count is exact.
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


@dataclass(frozen=True)
class Options(SelectingOptions):
    """`keep`: share of the tokens."""


def budget(grid: Grid, options: Options) -> int:
    """Number of tokens to keep: the share `keep`."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Keep the most diverse tokens."""
    assert signals.features is not None
    return selected(select(signals.features, budget(signals.grid, options)), signals, options)


def select(features: Tensor, count: int) -> Tensor:
    """Choose `count` of rows `[n, d]`; returns their indices in the order in which they are chosen."""
    rows = unit(features)
    distance = 1 - rows @ rows.T
    alone = distance.masked_fill(torch.eye(len(rows), dtype=torch.bool, device=rows.device), torch.inf)
    token = alone.amin(0).nan_to_num(posinf=0.0).argmax(0, keepdim=True)  # a single token has no neighbour
    nearest, chosen = torch.full_like(distance[0], torch.inf), [token]
    for _ in range(count - 1):
        nearest = torch.minimum(nearest, distance.index_select(0, token)[0]).scatter(0, token, -torch.inf)
        token = nearest.argmax(0, keepdim=True)
        chosen.append(token)
    return torch.cat(chosen)

"""DivPrune: the tokens that are farthest apart (arXiv 2503.02175), max-min diversity by cosine distance.

Greedy, as published: first the token whose nearest neighbour is farthest, then in each step the token whose nearest kept one
is farthest. The smallest distance between kept tokens is at least half of the optimum (for chord lengths; a quarter for 1 -
cosine). Rare tokens stay, even irrelevant ones. Costs `n^2 d` multiply-adds, `4 n^2` bytes and one step for each token kept.
Unlike the published code, a token is never chosen twice when only duplicates are left, so the count is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Reduction, Signals, unit
from vlmcompress.reduction.methods._selecting import SelectingReducer, for_all_images, kernels


@dataclass(frozen=True)
class DivPrune(SelectingReducer):
    """`keep`: share of the tokens."""

    STAGE = "projected"
    NEEDS = frozenset({"features"})
    BATCHED = True

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the most diverse tokens."""
        assert signals.features is not None
        return self.selected(select(signals.features, self.budget(signals.grid)), signals)


def select(features: Tensor, count: int) -> Tensor:
    """Choose `count` of rows `[n, d]`; returns their indices in the order in which they are chosen."""
    rows = unit(features)

    def choose(cosine: Tensor) -> Tensor:
        # [b, n, n] cosine distance, the paper's d(i, j); float32, as in bfloat16 near duplicates would all have distance 0.
        distance = cosine.neg_().add_(1)
        # A token is not its own neighbour; once chosen, its distance to the nearest kept token counts as -inf.
        distance.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        fused = kernels(distance.device, distance.shape[1])
        return (fused.spread if fused else _steps)(distance, count)

    return for_all_images(choose, rows @ rows.T)


def _steps(distance: Tensor, count: int) -> Tensor:
    """Choose tokens `[b, count]` by `distance [b, n, n]`, whose diagonal is -inf."""
    chosen = torch.empty(count, len(distance), 1, dtype=torch.int64, device=distance.device)
    rows = chosen[..., None].expand(-1, -1, -1, distance.shape[2])  # the chosen tokens as indices of whole rows
    # The first token is the one whose nearest neighbour is farthest; a single token has none.
    itself = distance.diagonal(dim1=1, dim2=2)
    itself.fill_(torch.inf)
    nearest = distance.amin(2).nan_to_num_(posinf=0.0)
    itself.fill_(-torch.inf)
    alone = distance.device.type == "cpu" and len(distance) == 1
    for number, (token, row) in enumerate(zip(chosen.unbind(), rows.unbind(), strict=True)):
        torch.argmax(nearest, 1, keepdim=True, out=token)
        away = distance[:, int(token)] if alone else distance.gather(1, row)[:, 0]
        # min over the kept tokens j of d(i, j), updated with the last one; the next token maximizes it over i (max-min).
        nearest = torch.minimum(nearest, away, out=nearest) if number else away
    return chosen[..., 0].T


REDUCER = DivPrune()

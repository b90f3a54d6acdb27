"""An even grid of tokens, the other baseline: lower resolution regardless of content.

The budget is spread evenly over the frames, within a frame over about as many rows as give square cells, and within a
row over the columns; counts that do not divide differ by one. Exact for every budget, and every token for `keep: 1`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reduction, Signals
from vlmcompress.reduction.methods._selecting import SelectingReducer


@dataclass(frozen=True)
class Uniform(SelectingReducer):
    """`keep`: share of the tokens."""

    STAGE = "projected"
    NO_BETTER_THAN = "random"

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the tokens of the even grid."""
        index = _index(signals.grid, self.budget(signals.grid)).to(signals.device, non_blocking=True)
        return self.selected(index, signals)


@functools.lru_cache(64)
def _index(grid: Grid, count: int) -> Tensor:
    """The tokens of the even grid, `[count]`."""
    frames, rows, columns = grid
    index = []
    for frame, left in enumerate(_spread(count, frames)):
        # As many rows as make cells square, but enough that no row needs more tokens than it has columns.
        used = min(rows, left, max(math.ceil(left / columns), round(math.sqrt(left * rows / columns))))
        for row, tokens in zip(_centres(used, rows), _spread(left, used), strict=True):
            start = (frame * rows + row) * columns
            index += [start + column for column in _centres(tokens, columns)]
    return torch.tensor(index)


def _spread(total: int, parts: int) -> list[int]:
    """Split `total` into whole numbers that differ by at most one, the larger ones spread evenly."""
    return [((i + 1) * total + parts // 2) // parts - (i * total + parts // 2) // parts for i in range(parts)]


def _centres(count: int, cells: int) -> list[int]:
    """Choose `count` of `cells` positions, in the middle of equal parts."""
    return [(2 * i + 1) * cells // (2 * count) for i in range(count)]


REDUCER = Uniform()

"""A random choice of tokens, the baseline that every method has to beat (and many do not, arXiv 2511.02650).

The choice depends only on seed and grid, so it is the same for all images of one size, in every process and on every device. A
smaller `keep` keeps a subset of what a larger one keeps.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reduction, Signals, require_whole, top
from vlmcompress.reduction.methods._selecting import SelectingReducer


@dataclass(frozen=True)
class Random(SelectingReducer):
    """`keep`: share of the tokens; `seed`: which choice."""

    STAGE = "projected"

    seed: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("seed", self.seed, most=2**63 - 1)

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Give every token a random score and keep the highest."""
        order = _order(signals.grid, self.seed).to(signals.device, non_blocking=True)
        # A prefix of one order for all shares, so a smaller share keeps a subset of a larger one's.
        return self.selected(order[: self.budget(signals.grid)], signals)


@functools.lru_cache(64)
def _order(grid: Grid, seed: int) -> Tensor:
    """The tokens of a grid, the one of highest score first, `[n]`."""
    draw = random.Random(f"{seed} {grid}")  # Python promises this sequence for good; torch does not
    scores = torch.tensor([draw.random() for _ in range(math.prod(grid))], dtype=torch.float64)
    return top(scores, len(scores))


REDUCER = Random()

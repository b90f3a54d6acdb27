"""A random choice of tokens, the baseline that every method has to beat (and many do not, arXiv 2511.02650).

Looks at nothing: the choice follows from the seed and the grid, so it is the same for all images of one size, in every
process and on every device. A smaller `keep` keeps a subset of what a larger one keeps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from vlmcompress.reducers._base import Grid, Reduction, Signals, check_whole, share, top
from vlmcompress.reducers._selecting import SelectingOptions, selected

STAGE = "projected"
NEEDS: frozenset[str] = frozenset()
OPTIONAL = frozenset({"features"})
COUNT = "fixed"
SERVED = True


@dataclass(frozen=True)
class Options(SelectingOptions):
    """`keep`: share of the tokens; `seed`: which choice."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("seed", self.seed)


def budget(grid: Grid, options: Options) -> int:
    """Number of tokens to keep: the share `keep`."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Give every token a random score and keep the highest."""
    draw = random.Random(f"{options.seed} {signals.grid}")  # Python promises this sequence for good; torch does not
    scores = torch.tensor([draw.random() for _ in range(signals.n)], dtype=torch.float64, device=signals.device)
    return selected(top(scores, budget(signals.grid, options)), signals, options)

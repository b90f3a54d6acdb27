"""Variable level of detail: regions that matter for the question keep every token, the background one mean each. Ours.

The image is cut into regions of 4 x 4 tokens, each shown at one of four levels: background, 1 token; low, 4 means of
2 x 2; medium, 8 means of two neighbours; high, all 16 tokens. All start as background, and the budget goes step by step
to whichever region's next level is worth most for each token that it costs, worth being exp(sharpness * relevance).
Relevance of a token is its best cosine to a token of the question, of a region that of its most relevant token,
stretched to 0...1 over the image. What is left for the last step shows only its region's first rows at the new level,
so the count is exact. With fewer tokens than regions, the least relevant regions are dropped.

Nothing else is lost entirely, and the layout survives. Depends on the question, so an image's result cannot be reused
for another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmcompress.reducers._base import Grid, ReducerOptions, Reduction, Signals, check_keep, share, unit

STAGE = "projected"
NEEDS = frozenset({"features", "query"})
COUNT = "fixed"
SERVED = True
NO_BETTER_THAN = "random"

_CELLS = ((4, 4), (2, 2), (1, 2), (1, 1))  # rows and columns of what is one token: background, low, medium, high


@dataclass(frozen=True)
class Options(ReducerOptions):
    """`keep`: share of the tokens; `sharpness`: the most relevant region is worth exp(sharpness) times the least."""

    keep: float = 0.5
    sharpness: float = 3.0

    def __post_init__(self) -> None:
        check_keep(self.keep)
        number = isinstance(self.sharpness, int | float) and not isinstance(self.sharpness, bool)
        if not number or not 0 <= self.sharpness <= 100:
            raise ValueError(f"sharpness must be a number from 0 to 100, got {self.sharpness!r}")


def budget(grid: Grid, options: Options) -> int:
    """Number of tokens of all levels together: the share `keep`."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Refine the most relevant regions until the budget is spent."""
    assert signals.features is not None and signals.query is not None
    cells = [_cells(signals.grid, *size) for size in _CELLS]
    regions = cells[0]
    worth = _worth(signals, regions, options.sharpness)
    left = budget(signals.grid, options)
    order = sorted(range(len(worth)), key=lambda region: (-worth[region], region))
    if left <= len(order):
        shown = torch.zeros(len(worth), dtype=torch.bool)
        shown[order[:left]] = True
        return _joined(torch.where(shown[regions], regions, -1), signals)
    left -= len(order)
    label = regions.clone()
    for region, level, new in _steps(cells, worth):
        apart = (regions == region) & torch.isin(cells[level], torch.tensor(new[:left]))
        label[apart] = len(label) * level + cells[level][apart]  # no two levels share a label
        left -= len(new[:left])
        if left == 0:
            break
    return _joined(label, signals)


def _steps(cells: list[Tensor], worth: list[float]) -> list[tuple[int, int, list[int]]]:
    """List steps (region, level, cells set apart, one token more each) in the order in which the budget should pay for them."""
    steps = []
    for region, value in enumerate(worth):
        tokens, price = (cells[0] == region).nonzero().squeeze(1), math.inf
        for level in range(1, len(_CELLS)):
            new = _split(cells[level - 1][tokens], cells[level][tokens])
            if new:
                # In a region cut off by the edge a finer level may cost less; it still waits for its turn.
                price = min(price, value / len(new))
                steps.append((price, level, region, new))
    steps.sort(key=lambda step: (-step[0], *step[1:3]))
    return [(region, level, new) for _, level, region, new in steps]


def _worth(signals: Signals, regions: Tensor, sharpness: float) -> list[float]:
    """Worth of each region, from 1 to exp(sharpness)."""
    assert signals.features is not None and signals.query is not None
    if len(signals.query) == 0:
        return [1.0] * (int(regions.max()) + 1)
    match = (unit(signals.features) @ unit(signals.query.to(signals.features.device)).T).amax(1).cpu()
    best = torch.full((int(regions.max()) + 1,), -torch.inf).scatter_reduce(0, regions, match, "amax")
    low, high = best.min().item(), best.max().item()
    return [math.exp(sharpness * (value - low) / (high - low)) if high > low else 1.0 for value in best.tolist()]


def _cells(grid: Grid, rows: int, columns: int) -> Tensor:
    """Number of each token's cell of `rows x columns` tokens, `[n]`; cells lie within regions, also in a last, smaller one."""
    frames, height, width = (torch.arange(length) for length in grid)
    across = -(-grid[2] // columns)
    flat = (height // rows)[:, None] * across + width // columns
    return (frames[:, None, None] * (-(-grid[1] // rows) * across) + flat).flatten()


def _split(coarse: Tensor, fine: Tensor) -> list[int]:
    """Fine cells to set apart so that a region goes from coarse to fine ones: all but the last of each coarse cell."""
    last = {parent: child for parent, child in zip(coarse.tolist(), fine.tolist(), strict=True)}
    return sorted(set(fine.tolist()) - set(last.values()))


def _joined(label: Tensor, signals: Signals) -> Reduction:
    """Merge tokens of one label into the middle one; -1 drops."""
    ordered = label.sort(stable=True)
    counts = ordered.values.unique_consecutive(return_counts=True)[1]
    middle = ordered.indices[counts.cumsum(0) - counts + counts // 2]
    parent = torch.empty_like(label)
    parent[ordered.indices] = middle.repeat_interleave(counts)
    return Reduction.join(parent.where(label >= 0, -1).to(signals.device))

"""Variable level of detail: regions relevant to the question keep every token, background regions one mean. Our
method.

The image is cut into regions of 4 x 4 tokens, each shown at one of four levels: background, 1 token; low, 4 means of
2 x 2; medium, 8 means of two neighbours; high, all 16 tokens. All start as background, and the budget is spent step by step on
the region whose next level has the highest value per token, where the value is exp(SHARPNESS * relevance). A token's relevance
is its highest cosine with a token of the question; a region's relevance is that of its most relevant token, scaled to 0...1
over the image. If the budget does not cover the last step, only the region's first rows get the new level, so the count is
exact. With fewer tokens than regions, the least relevant regions are dropped.

Nothing else is lost entirely, and the layout is preserved. Depends on the question, so an image's result cannot be reused for
another.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reduction, ShareReducer, Signals, top, unit

_CELLS = ((4, 4), (2, 2), (1, 2), (1, 1))  # rows and columns of what is one token: background, low, medium, high
SHARPNESS = 3.0
"""The most relevant region has exp(SHARPNESS) times the value of the least relevant one."""


@dataclass(frozen=True)
class Relevance(ShareReducer):
    """`keep`: share of the tokens."""

    STAGE = "projected"
    NEEDS = frozenset({"features", "query"})
    NO_BETTER_THAN = "random"

    keep: float = 0.5

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Refine the most relevant regions until the budget is spent."""
        steps, count, n = _steps(signals.grid), self.budget(signals.grid), signals.n
        cells, place, rank, region, size, widest = (
            table.to(signals.device, non_blocking=True)
            for table in (steps.cells, steps.place, steps.rank, steps.region, steps.size, steps.widest)
        )
        scores = _scores(signals, cells[0], steps.regions)
        if count <= steps.regions:
            refined = torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, top(scores, count), True)
            return _joined(torch.where(refined[cells[0]], cells[0], -1), count)
        # Greedy by value per token; `widest` keeps a region's finer steps after its coarser ones.
        order = top(scores[region] / widest, len(region))
        before = size[order].cumsum(0) - size[order]  # tokens that the steps before cost
        apart = torch.zeros_like(size)
        apart[order] = (count - steps.regions - before).clamp(min=0)
        label = cells[0]
        for level in range(1, len(_CELLS)):  # no two levels share a label
            label = torch.where(rank[level] < apart[place[level]], n * level + cells[level], label)
        return _joined(label, count)


@dataclass(frozen=True)
class _Steps:
    """The refinement steps on a grid. A step takes a region to its next level and splits off cells, each one token more.

    cells:  `[levels, n]`, each token's cell at each level; of level 0 its region.
    place:  `[levels, n]`, the step that splits off that cell.
    rank:   `[levels, n]`, the cell's order within the step, `n` for cells that no step splits off.
    region: `[s]`, region of each step; steps are ordered by level, then region.
    size:   `[s]`, number of cells that it splits off.
    widest: `[s]`, the largest size of it and the region's earlier steps.
    """

    regions: int
    cells: Tensor
    place: Tensor
    rank: Tensor
    region: Tensor
    size: Tensor
    widest: Tensor


@functools.lru_cache(64)
def _steps(grid: Grid) -> _Steps:
    """List the steps of a grid, on the CPU; they depend on no image."""
    cells = [_cells(grid, *size) for size in _CELLS]
    n, regions = len(cells[0]), int(cells[0].max()) + 1
    place, rank = torch.zeros(len(_CELLS), n, dtype=torch.int64), torch.full((len(_CELLS), n), n)
    tokens = [(cells[0] == region).nonzero().squeeze(1) for region in range(regions)]
    # In a region cut off by the edge a finer level may cost less; it still waits for its turn.
    widest, rows = [0] * regions, list[tuple[int, int, int]]()
    for level in range(1, len(_CELLS)):
        for region, index in enumerate(tokens):
            fine = cells[level][index]
            turns = {cell: turn for turn, cell in enumerate(_split(cells[level - 1][index], fine))}
            if turns:
                place[level, index] = len(rows)
                rank[level, index] = torch.tensor([turns.get(cell, n) for cell in fine.tolist()])
                widest[region] = max(widest[region], len(turns))
                rows.append((region, len(turns), widest[region]))
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    return _Steps(regions, torch.stack(cells), place, rank, *table.unbind(1))


def _scores(signals: Signals, regions: Tensor, number: int) -> Tensor:
    """The value of each of `number` regions, from 1 to exp(SHARPNESS), `[number]` float64."""
    assert signals.features is not None and signals.query is not None
    if len(signals.query) == 0:
        return torch.ones(number, dtype=torch.float64, device=regions.device)
    match = (unit(signals.features) @ unit(signals.query.to(signals.features.device)).T).amax(1).double()
    best = torch.full((number,), -torch.inf, dtype=torch.float64, device=match.device)
    best = best.scatter_reduce(0, regions, match, "amax")
    # Scaled to 0...1 over the image, as the range of cosines differs between models.
    low, high = best.amin(), best.amax()
    return (SHARPNESS * (best - low) / torch.where(high > low, high - low, 1.0)).exp()


def _cells(grid: Grid, rows: int, columns: int) -> Tensor:
    """Number of each token's cell of `rows x columns` tokens, `[n]`; cells lie within regions, also in a last, smaller one."""
    frames, height, width = (torch.arange(length) for length in grid)
    across = -(-grid[2] // columns)
    flat = (height // rows)[:, None] * across + width // columns
    return (frames[:, None, None] * (-(-grid[1] // rows) * across) + flat).flatten()


def _split(coarse: Tensor, fine: Tensor) -> list[int]:
    """Fine cells to split off to refine a region from coarse to fine cells: all but the last of each coarse cell."""
    last = {parent: child for parent, child in zip(coarse.tolist(), fine.tolist(), strict=True)}
    return sorted(set(fine.tolist()) - set(last.values()))


def _joined(label: Tensor, count: int) -> Reduction:
    """Merge tokens of one label, of which there are `count`, into the middle one; -1 drops."""
    ordered = label.sort(stable=True)
    first, end = (torch.searchsorted(ordered.values, ordered.values, right=right) for right in (False, True))
    parent = torch.empty_like(label)
    parent[ordered.indices] = ordered.indices[first + (end - first) // 2]
    return Reduction.join(parent.where(label >= 0, -1), count=count)


REDUCER = Relevance()

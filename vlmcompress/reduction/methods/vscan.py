"""VScan's first stage: a global and a local scan in the encoder, the rest merged (arXiv 2505.22654).

Half the budget is local: the most attended tokens in a shallow layer (`windowed`), from each window at most its share of that
half, rounded up, so that every part of the image is represented. The other half is global: the most attended of the remaining
tokens in the layer whose output is used (`saliency`). After the projector every dropped token is merged into the kept one with
the highest cosine, as a plain mean.

Windows and quota are those of the authors' code for Qwen2.5-VL: if a side is not divisible, the last window of a row or column
includes the remainder. In their code for LLaVA sides always divide (16 windows of 6 x 6), and each window gives the same whole
number of tokens: the same choice where 16 divides half the budget; elsewhere that code keeps fewer tokens than its budget, and
this the exact number. Against the code for Qwen: the budget is rounded half up, not down; an image narrower than a window is
one window, and if windows are too small for their quota, the most attended other tokens fill it (the code fails in both
cases); each frame has separate windows. Qwen's encoders have no CLS, and this package does not hook the attention that the
authors use there, so the method is not available for Qwen.

The published second stage, within the language model, is FastV's rule at another layer; it is not implemented.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reduction, ShareReducer, Signals, require_whole, top, unit


@dataclass(frozen=True)
class VScan(ShareReducer):
    """`keep`: share of the tokens; `window`: side of a window in tokens (6 for LLaVA's 24 x 24, 4 for Qwen2.5-VL); `shallow`:
    number of the encoder's block, from 0, whose attention is `windowed` (Qwen2.5-VL: its first block with full attention)."""

    STAGE = "projected"
    NEEDS = frozenset({"features", "saliency", "windowed"})
    NO_BETTER_THAN = "random"

    keep: float = 1 / 6
    window: int = 6
    shallow: int = 5

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("window", self.window, least=1)

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Scan locally, then globally, and merge the dropped tokens into the kept."""
        assert signals.features is not None and signals.saliency is not None and signals.windowed is not None
        count = self.budget(signals.grid)
        kept = torch.zeros(signals.n, dtype=torch.bool, device=signals.saliency.device)
        window = windows(signals.grid, self.window, kept.device)
        kept[top_per_window(signals.windowed, window, count // 2, math.prod(_tiles(signals.grid, self.window)))] = True
        # Global scan, among the tokens not chosen by the local scan.
        rest = signals.saliency.float().masked_fill(kept, -torch.inf)
        kept[top(rest, count - count // 2)] = True
        rows, anchors = unit(signals.features), top(kept, count)
        # Every dropped token joins its most similar kept one; the mean (kept + sum) / (1 + number) is that of `join`.
        nearest = anchors[(rows @ rows[anchors].T).argmax(1)]
        return Reduction.join(torch.where(kept, torch.arange(signals.n, device=kept.device), nearest), count=count)


def windows(grid: Grid, side: int, device: torch.device | None = None) -> Tensor:
    """Number of each token's window, `[n]`; windows are tiles of `side x side` from the upper left corner of each frame.

    The last ones of a row and of a column include the remainder, so every window has at least `side x side` tokens; a narrower
    frame has one window across.
    """
    frames, rows, columns = (torch.arange(length, device=device) for length in grid)
    _, down, across = _tiles(grid, side)
    tile = (rows // side).clamp(max=down - 1)[:, None] * across + (columns // side).clamp(max=across - 1)
    return (frames[:, None, None] * (down * across) + tile).flatten()


def _tiles(grid: Grid, side: int) -> Grid:
    """Frames, and windows down and across each."""
    return grid[0], max(1, grid[1] // side), max(1, grid[2] // side)


def top_per_window(scores: Tensor, window: Tensor, count: int, number: int | None = None) -> Tensor:
    """Indices `[count]` of the highest scores, at most `count / windows`, rounded up, from each window.

    Args:
        scores: `[n]`, score of each token.
        window: `[n]`, number of each token's window, from 0.
        number: number of windows; None: it is read from `window`.
    """
    order = top(scores, len(scores))
    owner = window.to(order.device)[order]
    # Tokens in order of score, grouped by window: a token's position in its group is its rank there.
    by_window = owner.sort(stable=True)
    first = torch.searchsorted(by_window.values, by_window.values)  # where the window's own run begins
    rank = torch.empty_like(order)  # rank of a token within its window
    rank[by_window.indices] = torch.arange(len(order), device=order.device) - first
    quota = -(-count // (int(window.max()) + 1 if number is None else number))
    return order[(rank >= quota).sort(stable=True).indices[:count]]  # tokens beyond the quota come last


REDUCER = VScan()

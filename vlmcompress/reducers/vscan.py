"""VScan's first stage: a global and a local scan in the encoder, the rest merged (arXiv 2505.22654).

Half the budget is local: the most attended tokens of each window in a shallow layer (`windowed`), so that every part of
the image is seen. The other half is global: the most attended of all that are left, in the layer whose output is used
(`saliency`). After the projector every dropped token joins the kept one with the highest cosine, as a plain mean.

The published code gives each window the same whole number, so its count is not the budget unless that divides. Here
windows take turns: each gives its best before any gives its second, and the last, incomplete turn goes to the most
attended; where the numbers divide that is the same. The published second stage, within the language model, is FastV's
rule at another layer: chain `SECOND_STAGE` behind this where the layer can be opened (96 kept here and a third of them
there: 64 on average).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmcompress.reducers._base import Grid, Reduction, Signals, check_keep, check_whole, share, top, unit

STAGE = "projected"
NEEDS = frozenset({"features", "saliency", "windowed"})
COUNT = "fixed"
SERVED = True
SECOND_STAGE = ("fastv", {"keep": 1 / 3, "layer": 16})  # of 32 blocks, LLaVA-1.5-7B; 14 of 28 in Qwen2.5-VL


@dataclass(frozen=True)
class Options:
    """`keep`: share of the tokens; `window`: side of a window in tokens (6 for LLaVA's 24 x 24, 4 for Qwen2.5-VL); `shallow`:
    number of the encoder's block, from 0, whose attention is `windowed` (Qwen2.5-VL: its first block with full attention)."""

    keep: float = 1 / 6
    window: int = 6
    shallow: int = 5

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_whole("window", self.window, least=1)
        check_whole("shallow", self.shallow)


def budget(grid: Grid, options: Options) -> int:
    """The share `keep`, local and global together."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Scan locally, then globally, and merge the dropped tokens into the kept."""
    assert signals.features is not None and signals.saliency is not None and signals.windowed is not None
    count = budget(signals.grid, options)
    kept = torch.zeros(signals.n, dtype=torch.bool, device=signals.saliency.device)
    kept[local(signals.windowed, windows(signals.grid, options.window), count // 2)] = True
    rest = signals.saliency.float().masked_fill(kept, -torch.inf)
    kept[top(rest, count - count // 2)] = True
    rows, anchors = unit(signals.features), kept.nonzero().squeeze(1)
    nearest = anchors[(rows @ rows[anchors].T).argmax(1)]
    return Reduction.join(torch.where(kept, torch.arange(signals.n, device=kept.device), nearest))


def windows(grid: Grid, side: int) -> Tensor:
    """`[n]`: number of each token's window, tiles of `side x side` from the upper left corner of each frame."""
    frames, rows, columns = (torch.arange(length) for length in grid)
    down, across = -(-grid[1] // side), -(-grid[2] // side)
    tile = (rows // side)[:, None] * across + columns // side
    return (frames[:, None, None] * (down * across) + tile).flatten()


def local(scores: Tensor, window: Tensor, count: int) -> Tensor:
    """`[count]` indices: the windows' best in turns, the last turn by score."""
    order = top(scores, len(scores))
    owner = window.to(order.device)[order]
    by_window = owner.sort(stable=True)
    first = torch.searchsorted(by_window.values, by_window.values)  # where the window's own run begins
    turn = torch.empty_like(order)
    turn[by_window.indices] = torch.arange(len(order), device=order.device) - first
    return order[turn.sort(stable=True).indices[:count]]

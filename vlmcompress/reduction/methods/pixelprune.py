"""PixelPrune: leave out patches that their neighbours predict, before the encoder runs (arXiv 2604.00886).

Tokens (2 x 2 patches in the Qwen family) are visited in raster order, and each is predicted from its neighbours left
(A), above (B) and above left (C) as they would be reconstructed: B if C is like A and unlike B, a vertical edge; else
A; in the first column B. A token is dropped if no pixel is off its prediction by more than `tolerance`, and then counts
as its prediction for those behind it, so errors do not add up: every token is within the tolerance of one that is kept.
Documents and screens lose half their tokens and nothing else; of a photograph nothing goes. The count follows from the
pixels alone, before anything runs, so it can be served.

Cells on one antidiagonal need only the two before, so `h + w - 1` steps do all frames at once. Frames are treated
separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmcompress.reduction.methods._base import Grid, ReducerOptions, Reduction, Signals

STAGE = "pixels"
NEEDS = frozenset({"pixels"})
COUNT = "adaptive"
SERVED = True


@dataclass(frozen=True)
class Options(ReducerOptions):
    """`tolerance`: largest difference of a pixel that goes unnoticed, in the units of the pixels; 0 drops exact copies only."""

    tolerance: float = 0.0

    def __post_init__(self) -> None:
        number = isinstance(self.tolerance, int | float) and not isinstance(self.tolerance, bool)
        if not number or not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance must be a number of at least 0, got {self.tolerance!r}")


def budget(grid: Grid, options: Options) -> None:
    """Return None, as the number of kept tokens depends on the pixels."""
    return None


def reduce(signals: Signals, options: Options) -> Reduction:
    """Keep tokens that cannot be predicted, and the first token of each frame."""
    assert signals.pixels is not None
    frames, rows, columns = signals.grid
    pixels = (
        signals.pixels.float().reshape(frames, rows, columns, -1).clone()
    )  # each token as it would be reconstructed
    kept = torch.zeros(signals.grid, dtype=torch.bool, device=pixels.device)
    kept[:, 0, 0] = True
    for diagonal in range(1, rows + columns - 1):
        r = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=pixels.device)
        c = diagonal - r
        left, above = pixels[:, r, (c - 1).clamp(min=0)], pixels[:, (r - 1).clamp(min=0), c]
        corner = pixels[:, (r - 1).clamp(min=0), (c - 1).clamp(min=0)]
        edge = _alike(corner, left, options) & ~_alike(corner, above, options) & (r > 0)
        guess = torch.where((edge | (c == 0))[..., None], above, left)
        new = ~_alike(pixels[:, r, c], guess, options)
        kept[:, r, c] = new
        pixels[:, r, c] = torch.where(new[..., None], pixels[:, r, c], guess)
    return Reduction.keep(kept.flatten().nonzero().squeeze(1), signals.n)


def _alike(a: Tensor, b: Tensor, options: Options) -> Tensor:
    return (a - b).abs().amax(-1) <= options.tolerance

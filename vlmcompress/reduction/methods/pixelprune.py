"""PixelPrune: drop what a picture's own pixels predict, so that pages lose their margins and text stays (arXiv 2604.00886).

Each token shows a unit of pixels. Units are predicted in raster order, as lossless image coders predict pixels, from what a
decoder would have to the left, above, and above to the left. Like the median predictor of JPEG-LS, with whole units as values:

    prediction = above, if left equals above left; else left

The first row is predicted from the left, the first column from above, and the first unit is always kept. A unit is dropped when
it equals its prediction, and a dropped one stands for that prediction in later ones: errors do not add up. Two units are equal
when no colour value differs by more than `threshold`; at 0 the image can be restored from what is kept. Which of the three
neighbours predicts is our reading of the paper, which prunes before the encoder; here the encoder sees the whole image, and the
language model loses the tokens.

The count follows from the image and is known before the encoder runs: flat pages and screenshots keep few tokens, photographs
nearly all. Frames are predicted separately. Costs four comparisons of pixels for each unit. What is far apart on an empty page
has no tokens between, only positions that say so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reducer, Reduction, Signals, require_number


@dataclass(frozen=True)
class PixelPrune(Reducer):
    """`threshold`: the largest difference between colour values, 0 to 1 (black to white), of units that count as equal."""

    STAGE = "projected"
    NEEDS = frozenset({"pixels"})
    COUNT = "adaptive"

    threshold: float = 0.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("threshold", self.threshold, 0, 1)

    @override
    def budget(self, grid: Grid) -> None:
        """Return None: the number of kept tokens is not known in advance."""
        return None

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the units that differ from their prediction."""
        assert signals.pixels is not None
        frames, rows, columns = signals.grid
        pixels = signals.pixels.unflatten(0, (frames, rows, columns))
        kept = torch.cat([unpredicted(frame, self.threshold).flatten() for frame in pixels])
        return Reduction.keep(kept.nonzero().squeeze(1), signals.n)


def unpredicted(pixels: Tensor, threshold: float) -> Tensor:
    """Mark the units of `pixels [rows, columns, values]` that differ from their prediction, `[rows, columns]` bool."""
    rows, columns, _ = pixels.shape
    units, device = pixels.flatten(0, 1), pixels.device
    # Number of the unit that stands for each one; of a kept unit its own. With a border, so that all have three neighbours.
    stands = torch.zeros(rows + 1, columns + 1, dtype=torch.int64, device=device)
    kept = torch.zeros(rows, columns, dtype=torch.bool, device=device)

    def equal(first: Tensor, second: Tensor) -> Tensor:
        return (units[first] - units[second]).abs().amax(-1) <= threshold

    # Units on a diagonal do not predict each other, so each step decides on one diagonal.
    for diagonal in range(rows + columns - 1):
        row = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=device)
        column = diagonal - row
        left, above, corner = stands[row + 1, column], stands[row, column + 1], stands[row, column]
        upward = (column == 0) | ((row > 0) & equal(left, corner))
        prediction = torch.where(upward, above, left)
        number = row * columns + column
        predicted = equal(number, prediction) & (number > 0)
        kept[row, column] = ~predicted
        stands[row + 1, column + 1] = torch.where(predicted, prediction, number)
    return kept


REDUCER = PixelPrune()

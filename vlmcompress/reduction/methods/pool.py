"""Pooling: the mean of neighbouring tokens, the other obvious baseline: lower resolution after the encoder.

The grid of each frame is cut into windows of `rows x columns` tokens, from the top left; windows at the right and the lower
edge may be smaller. Each window becomes the mean of its tokens, at the position of its middle one (of two middles the first).
Nothing is dropped or chosen, so the number of tokens follows from the grid alone. Unlike resizing the image this does not save
the encoder's work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reducer, Reduction, Signals


@dataclass(frozen=True)
class Pool(Reducer):
    """`window`: rows and columns of neighbours that become one token, such as `2x2`, `1x2` or `3x3`; at most 64 of each."""

    STAGE = "projected"

    window: str = "2x2"

    @override
    def __post_init__(self) -> None:
        if not isinstance(self.window, str) or not re.fullmatch(r"[1-9][0-9]?x[1-9][0-9]?", self.window):
            raise ValueError(f"window must be rows and columns, like 2x2, got {str(self.window)[:40]!r}")
        if max(self.sides) > 64:
            raise ValueError(f"window must be at most 64x64, got {self.window!r}")

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of a window."""
        rows, columns = self.window.split("x")
        return int(rows), int(columns)

    @override
    def budget(self, grid: Grid) -> int:
        """Number of windows in the grid."""
        (frames, height, width), (rows, columns) = grid, self.sides
        return frames * -(-height // rows) * -(-width // columns)

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Join the tokens of each window."""
        (frames, height, width), (rows, columns) = signals.grid, self.sides
        device = signals.device
        row, column = _middles(height, rows, device), _middles(width, columns, device)
        first = torch.arange(frames, device=device) * (height * width)
        # [frames, height, width]: each token's parent is the middle of its window, in the row and in the column.
        parent = first[:, None, None] + row[:, None] * width + column
        return Reduction.join(parent.flatten(), count=self.budget(signals.grid))


def _middles(length: int, step: int, device: torch.device) -> Tensor:
    """For each of `length` positions the middle of its window of `step` positions (the last may be smaller), `[length]`."""
    start = torch.arange(length, device=device) // step * step
    end = (start + step).clamp(max=length)
    return start + (end - start - 1) // 2


REDUCER = Pool()

"""EVS: of a video, the tokens that differ most from the frame before (arXiv 2510.14624).

A token's score is one minus its cosine to the token at its place in the previous frame. The first frame is always kept,
whole; so an image, which is one frame, keeps all its tokens, and no video fewer than one frame has, however small the
share. vLLM prunes videos so itself, by `--video-pruning-rate`, but not in its CPU build. The count is this project's share,
rounded half up, where vLLM rounds down. Looks at one frame before only: slow changes add up unseen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reduction, Signals, rounded, top, unit
from vlmcompress.reduction.methods._selecting import SelectingReducer


@dataclass(frozen=True)
class EVS(SelectingReducer):
    """`keep`: share of a video's tokens."""

    STAGE = "projected"
    NEEDS = frozenset({"features"})
    MEDIA = "video"

    @override
    def budget(self, grid: Grid) -> int:
        """Number of tokens to keep: the share `keep`, and at least the first frame."""
        return max(math.prod(grid[1:]), rounded(grid, self.keep))

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the first frame and the tokens that change most."""
        assert signals.features is not None
        frames = unit(signals.features).reshape(signals.grid[0], -1, signals.features.shape[1])
        change = 1 - (frames[1:] * frames[:-1]).sum(-1)
        scores = torch.cat([torch.full_like(frames[0, :, 0], torch.inf), change.flatten()])
        return self.selected(top(scores, self.budget(signals.grid)), signals)


REDUCER = EVS()

"""HoloV: every part of the image gets tokens, more where attention and variety are (arXiv 2510.02912).

Each frame is cut into `crops` x `crops` tiles. A token's score is the attention that it receives plus `beta` times the
variance of its cosines to the other tokens of its crop, each in units of its mean over the image. The budget is shared out
among crops by a softmax of their mean scores, which are 1 on average, times `sharpness`; a crop of more tokens counts for as
many more. What a full crop cannot take goes to the others. Within a crop the highest scores stay.

Attention is that from CLS in the layer whose output is used. Only LLaVA's CLIP gives it here; in other families, whose
encoders have no CLS or are not opened by this package, the score is the variance alone.

The published code differs from this. It cuts the raster into runs of tokens, 16 of them, which in a square image are bands of
rows; this cuts both ways, and each frame of a video on its own. It scales variance to the attention of each crop, so that
crops do not differ by it; shares out by the score itself, about the same as the softmax near the mean; keeps what is most
attended within a crop; and leaves places empty where a crop has fewer tokens than its share.

Costs `n^2 d / crops^2` multiply-adds for an image, and `4 n^2 / crops^4` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmcompress.reducers._base import Grid, Reduction, Signals, check_whole, share, top, unit
from vlmcompress.reducers._selecting import SelectingOptions, selected

STAGE = "projected"
NEEDS = frozenset({"features"})
OPTIONAL = frozenset({"saliency"})
COUNT = "fixed"
SERVED = True
NO_BETTER_THAN = "random"
_FLAT = 1e-9  # a variance below is that of rounding
_DEEPEST = -600.0  # exponents below would make a weight 0


@dataclass(frozen=True)
class Options(SelectingOptions):
    """`keep`: share of the tokens; `crops`: a frame's crops across and down; `beta`: weight of variance beside attention;
    `sharpness`: a crop that scores one mean higher gets exp(sharpness) times the tokens, 0: all get their share."""

    crops: int = 4
    beta: float = 0.09
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("crops", self.crops, least=1)
        for name in ("beta", "sharpness"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= 100:
                raise ValueError(f"{name} must be a number from 0 to 100, got {value!r}")


def budget(grid: Grid, options: Options) -> int:
    """Number of tokens of all crops together: the share `keep`."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Share out the budget among crops, and keep the best tokens of each."""
    assert signals.features is not None
    crops = tiles(signals.grid, options.crops)
    scores = scored(signals.features, signals.saliency, crops, options.beta)
    means = [scores[crop.to(scores.device)].mean().item() for crop in crops]
    quotas = shared(means, [len(crop) for crop in crops], budget(signals.grid, options), options.sharpness)
    kept = []
    for crop, quota in zip(crops, quotas, strict=True):
        own = crop.to(scores.device)
        kept.append(own[top(scores[own], quota)])
    return selected(torch.cat(kept), signals, options)


def tiles(grid: Grid, crops: int) -> list[Tensor]:
    """Cut each frame into `crops` tiles down and across, fewer where it has fewer rows or columns; the tokens of each.

    Sides that do not divide give tiles whose sides differ by one.
    """
    frames, height, width = grid
    tokens = torch.arange(math.prod(grid)).view(grid)
    down, across = min(crops, height), min(crops, width)
    return [
        tile.flatten()
        for frame in range(frames)
        for band in tokens[frame].tensor_split(down, 0)
        for tile in band.tensor_split(across, 1)
    ]


def scored(features: Tensor, saliency: Tensor | None, crops: Sequence[Tensor], beta: float) -> Tensor:
    """Scores `[n]`, 1 on average: attention `saliency [n]`, where there is any, and variety within the token's crop."""
    rows = unit(features)
    variance = torch.zeros(len(rows), device=rows.device)
    for crop in crops:
        own = crop.to(rows.device)
        variance[own] = _variances(rows[own])
    variety = _relative(torch.where(variance > _FLAT, variance, 0.0))
    if saliency is None:
        return variety
    return (_relative(saliency.to(rows)) + beta * variety) / (1 + beta)


def _variances(rows: Tensor) -> Tensor:
    """Variance of each row's cosines to the others, `[n]`, for rows `[n, d]` of length 1; 0 where there are fewer than two."""
    cosines, others = rows @ rows.T, max(1, len(rows) - 1)
    mean = (cosines.sum(1) - cosines.diagonal()) / others
    return (cosines - mean[:, None]).fill_diagonal_(0).square().sum(1) / others


def _relative(values: Tensor) -> Tensor:
    """`values [n]`, none negative, in units of their mean; all 1 where all are 0."""
    mean = values.mean()
    return torch.where(mean > 0, values / mean, 1.0)


def shared(scores: Sequence[float], sizes: Sequence[int], count: int, sharpness: float) -> list[int]:
    """Share out `count` tokens among crops by `size * exp(sharpness * score)`, none getting more than its size.

    What is left after rounding down goes to the largest remainders, the lower index among equals.
    """
    highest = max(scores)
    worth = [
        size * math.exp(max(_DEEPEST, sharpness * (score - highest))) for score, size in zip(scores, sizes, strict=True)
    ]
    quotas, left, free = [0] * len(sizes), count, list(range(len(sizes)))
    while full := [crop for crop in free if left * worth[crop] >= sizes[crop] * sum(worth[one] for one in free)]:
        for crop in full:
            quotas[crop] = sizes[crop]
        left -= sum(sizes[crop] for crop in full)
        free = [crop for crop in free if crop not in full]
    total = sum(worth[crop] for crop in free)
    exact = {crop: left * worth[crop] / total for crop in free}
    for crop in free:
        quotas[crop] = math.floor(exact[crop])
    order = sorted(free, key=lambda crop: (quotas[crop] - exact[crop], crop))
    for crop in order[: count - sum(quotas)]:
        quotas[crop] += 1
    return quotas

"""Predict from an image's pixels how many tokens it keeps, before the encoder runs.

An engine reserves an image's tokens before encoding it, but DyMU's count, which depends on the image, is known only
after the encoder. A ridge regression on cheap statistics of the pixels, fitted on calibration images to the method's
own counts, predicts it; rounded up to a bucket, it is the exact count that the method then meets (`merge` or
`reduce` with a count). Too high a count costs tokens, too low a one detail, so `margin`, a quantile of the
calibration residuals, is added.

Statistics are computed from the processor's output rounded to bfloat16, so that every engine and type gets the same:
standard deviation of patches, and shares of flat ones, differences to the patches next to and below, and slopes.

A checkpoint has (see `reduction.block`)

    "count": {"patch": 14, "buckets": [36, 72, ...], "weights": [...], "mean": [...], "scale": [...], "bias": 210, "margin": 12}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.utils.errors import UserError

STEPS = 16
WIDTH = 14  # number of statistics of an image
_LIMIT = 1e6  # the largest bucket or other number in a checkpoint
_FLAT = (0.05, 0.15, 0.4)  # standard deviations below which a patch is flat, in the processor's units


@dataclass(frozen=True)
class TokenCounter:
    """A fitted regression from an image's pixels to the number of tokens that it keeps.

    Attributes:
        patch: side of a patch, in pixels.
        buckets: counts that can be given, ascending.
        weights: weight of each statistic, after `mean` is subtracted and `scale` divided out; `bias` is added.
        margin: tokens added to the prediction before rounding up.
    """

    patch: int
    buckets: tuple[int, ...]
    weights: tuple[float, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    bias: float
    margin: float = 0.0

    def predict(self, pixels: Tensor) -> float:
        """Predict the count of an image `[3, height, width]` from the model's processor, not rounded."""
        x = (features(pixels, self.patch) - torch.tensor(self.mean).double()) / torch.tensor(self.scale).double()
        return float(x @ torch.tensor(self.weights).double()) + self.bias

    def count(self, pixels: Tensor) -> int:
        """The image's count: the lowest bucket that suffices, else the highest."""
        predicted = self.predict(pixels) + self.margin
        return next((bucket for bucket in self.buckets if bucket >= predicted), self.buckets[-1])

    def plain(self) -> dict[str, Any]:
        """The counter as JSON data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def features(pixels: Tensor, patch: int) -> Tensor:
    """Compute the statistics `[14]` float64 of an image `[3, height, width]` of at least 2 x 2 patches."""
    # Engines hand out pixels in bfloat16 or float32: rounded to the coarser one first, both give the same count.
    image = pixels.detach().cpu().to(torch.bfloat16).double()
    rows, columns = image.shape[1] // patch, image.shape[2] // patch
    image = image[:, : rows * patch, : columns * patch]
    patches = image.reshape(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)  # [rows, columns, 3, patch, patch]
    spread = patches.flatten(3).std(-1).mean(-1)
    means = patches.mean((3, 4))
    right = (patches[:, 1:] - patches[:, :-1]).abs().mean((2, 3, 4)).flatten()
    below = (patches[1:] - patches[:-1]).abs().mean((2, 3, 4)).flatten()
    steps = torch.cat([right, below])
    maps = [
        spread.mean(),
        spread.std(),
        *((spread < flat).double().mean() for flat in _FLAT),
        means.flatten(0, 1).std(0).mean(),
        steps.mean(),
        steps.std(),
        *((steps < flat).double().mean() for flat in _FLAT),
        image.diff(dim=1).abs().mean(),
        image.diff(dim=2).abs().mean(),
        (spread.mean() + 1e-3).log(),
    ]
    return torch.stack(maps)


def fit_counter(
    pictures: Sequence[Tensor],
    counts: Sequence[int],
    patch: int,
    tokens: int,
    least: int = 1,
    penalty: float = 1.0,
    within: float = 0.75,
) -> TokenCounter:
    """Fit the regression from pictures `[3, height, width]` to the numbers of tokens that they keep.

    Args:
        patch: side of a patch, in pixels.
        tokens: number of tokens of an image that keeps all; buckets are multiples of its part `1 / STEPS`.
        least: number of tokens that an image cannot go below.
        penalty: factor of the squared weights of standardized statistics, added to the sum of squared errors.
        within: share of these pictures that must get at least as many tokens as they keep.
    """
    if len(pictures) != len(counts) or not pictures:
        raise ValueError("a count for each picture, and at least one")
    x = torch.stack([features(picture, patch) for picture in pictures])
    y = torch.tensor(counts).double()
    mean, scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    z = (x - mean) / scale
    # Ridge regression in closed form, (Z'Z + penalty I) w = Z'(y - mean); the bias is not penalized.
    weights = torch.linalg.solve(z.T @ z + penalty * torch.eye(z.shape[1]).double(), z.T @ (y - y.mean()))
    residuals = (y - y.mean() - z @ weights).sort().values
    # The residual that the share `within` of the images does not exceed; never below 0.
    margin = max(0.0, residuals[min(len(y) - 1, math.ceil(within * len(y)) - 1)].item())
    buckets = {max(least, math.ceil(tokens * step / STEPS)) for step in range(1, STEPS + 1)}
    fitted: dict[str, Any] = {"weights": weights, "mean": mean, "scale": scale}
    return TokenCounter(
        patch,
        tuple(sorted(buckets)),
        **{name: tuple(values.tolist()) for name, values in fitted.items()},
        bias=y.mean().item(),
        margin=margin,
    )


def read_counter(content: Any, where: str) -> TokenCounter:
    """Read the counter of a checkpoint. `where` begins the message of the UserError that anything wrong raises."""
    names = list(TokenCounter.__dataclass_fields__)
    if not isinstance(content, Mapping) or set(content) != set(names):
        raise UserError(f"{where} should be a mapping of {', '.join(names)}; export it again")
    for name in ("weights", "mean", "scale"):
        value = content[name]
        if not isinstance(value, list) or len(value) != WIDTH or not all(map(_number, value)):
            raise UserError(f"{where}.{name} should be {WIDTH} numbers; export it again")
    if not all(value > 0 for value in content["scale"]):
        raise UserError(f"{where}.scale should be above 0; export it again")
    for name in ("bias", "margin"):
        if not _number(content[name]):
            raise UserError(f"{where}.{name} is {content[name]!r}, should be a number; export it again")
    if type(content["patch"]) is not int or not 1 <= content["patch"] <= 1024:
        raise UserError(f"{where}.patch is {content['patch']!r}, should be a whole number of pixels; export it again")
    buckets = content["buckets"]
    whole = isinstance(buckets, list) and 0 < len(buckets) <= 1024 and all(type(bucket) is int for bucket in buckets)
    if not whole or not all(low < high for low, high in zip([0, *buckets], [*buckets, _LIMIT], strict=True)):
        raise UserError(f"{where}.buckets should be ascending whole numbers above 0; export it again")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    return TokenCounter(**values)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= _LIMIT

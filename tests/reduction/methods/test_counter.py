"""The count of an image's tokens from its pixels: statistics by loops, the regression against lstsq, bad blocks."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
import torch

from vlmcompress.reduction.methods import TokenCounter, fit_counter, read_counter
from vlmcompress.reduction.methods._counter import features
from vlmcompress.utils.errors import UserError


def r2(counter: TokenCounter, pictures: list[torch.Tensor], counts: list[int]) -> float:
    """Share of the counts' variance that the regression explains."""
    y = torch.tensor(counts).double()
    predicted = torch.tensor([counter.predict(picture) for picture in pictures]).double()
    return 1 - float(((y - predicted) ** 2).sum() / ((y - y.mean()) ** 2).sum().clamp(min=1e-12))


def drawn(number: int, side: int = 24) -> torch.Tensor:
    """A picture with `number` noisy 4x4 patches on grey."""
    generator = torch.Generator().manual_seed(number)
    image = torch.full((3, side, side), 0.3)
    for place in torch.randperm((side // 4) ** 2, generator=generator)[:number].tolist():
        row, column = divmod(place, side // 4)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = torch.randn(3, 4, 4, generator=generator)
    return image


PICTURES = [drawn(number) for number in range(36)]
TRUE = [4 + number // 2 for number in range(36)]


def slow(pixels: torch.Tensor, side: int) -> list[float]:
    """The statistics, patch by patch."""
    image = pixels.bfloat16().double()
    rows, columns = image.shape[1] // side, image.shape[2] // side
    cut = {
        (r, c): image[:, r * side : r * side + side, c * side : c * side + side]
        for r in range(rows)
        for c in range(columns)
    }
    spread = [statistics.mean(statistics.stdev(band.flatten().tolist()) for band in patch) for patch in cut.values()]
    steps = [
        (cut[r, c] - cut[other]).abs().mean().item()
        for r, c in cut
        for other in ((r, c + 1), (r + 1, c))
        if other in cut
    ]
    bands = [statistics.stdev(patch[band].mean().item() for patch in cut.values()) for band in range(3)]
    inner = image[:, : rows * side, : columns * side]

    def shares(values):
        return [sum(value < flat for value in values) / len(values) for flat in (0.05, 0.15, 0.4)]

    return [
        *(statistics.mean(spread), statistics.stdev(spread), *shares(spread), statistics.mean(bands)),
        *(statistics.mean(steps), statistics.stdev(steps), *shares(steps)),
        (inner[:, 1:] - inner[:, :-1]).abs().mean().item(),
        (inner[:, :, 1:] - inner[:, :, :-1]).abs().mean().item(),
        math.log(statistics.mean(spread) + 1e-3),
    ]


@pytest.mark.parametrize("size", [(24, 24), (27, 14)])
def test_statistics(size):
    pixels = torch.randn(3, *size, generator=torch.Generator().manual_seed(0))
    pixels[:, :8, :8] = 0.2
    assert features(pixels, 4).tolist() == pytest.approx(slow(pixels, 4), abs=1e-9)


def test_the_type_does_not_matter():
    pixels = drawn(9)
    assert torch.equal(features(pixels, 4), features(pixels.bfloat16(), 4))
    assert torch.equal(features(pixels, 4), features(pixels.double(), 4))


def test_ridge_is_least_squares_of_the_penalized_problem():
    counter = fit_counter(PICTURES, TRUE, 4, 36, penalty=2.0, within=0.5)
    x = torch.stack([features(picture, 4) for picture in PICTURES])
    z = (x - x.mean(0)) / x.std(0, correction=0).clamp(min=1e-6)
    y = torch.tensor(TRUE).double()
    rows = torch.cat([z, 2.0**0.5 * torch.eye(z.shape[1]).double()])
    values = torch.cat([y - y.mean(), torch.zeros(z.shape[1]).double()])
    weights = torch.linalg.lstsq(rows, values[:, None]).solution[:, 0]
    assert counter.weights == pytest.approx(weights.tolist(), abs=1e-8) and counter.bias == pytest.approx(
        y.mean().item()
    )
    for picture, row in zip(PICTURES, z, strict=True):
        assert counter.predict(picture) == pytest.approx(float(row @ weights + y.mean()), abs=1e-6)
    assert r2(counter, PICTURES, TRUE) > 0.95


def test_counts_are_buckets_and_mostly_enough():
    counter = fit_counter(PICTURES, TRUE, 4, 36, least=6, within=0.8)
    assert counter.buckets[0] == 6 and counter.buckets[-1] == 36 and len(counter.buckets) == 15
    counts = [counter.count(picture) for picture in PICTURES]
    assert set(counts) <= set(counter.buckets)
    assert sum(count >= true for count, true in zip(counts, TRUE, strict=True)) >= 0.8 * len(TRUE)
    for picture, count in zip(PICTURES, counts, strict=True):
        predicted = counter.predict(picture) + counter.margin
        assert count >= min(predicted, 36) and not any(predicted <= bucket < count for bucket in counter.buckets)
    assert dataclasses.replace(counter, bias=1e5).count(PICTURES[0]) == 36
    assert dataclasses.replace(counter, bias=-1e5).count(PICTURES[0]) == 6


def test_flat_pictures_alone_are_no_problem():
    counter = fit_counter([drawn(0)] * 3, [5, 5, 5], 4, 36)
    assert counter.predict(drawn(0)) == pytest.approx(5)
    with pytest.raises(ValueError, match="at least one"):
        fit_counter([], [], 4, 36)


def test_a_written_counter_is_read_back():
    counter = fit_counter(PICTURES, TRUE, 4, 36)
    assert read_counter(json.loads(json.dumps(counter.plain())), "count") == counter


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [0.1]}, "count.weights should be 14 numbers"),
        ({"mean": [float("nan")] * 14}, "count.mean should be 14 numbers"),
        ({"weights": [1e300] * 14}, "count.weights"),
        ({"weights": "x" * 14}, "count.weights"),
        ({"scale": [0.0] * 14}, "count.scale should be above 0"),
        ({"bias": "1"}, "count.bias is '1', should be a number"),
        ({"margin": True}, "count.margin is True"),
        ({"patch": 0}, "count.patch is 0"),
        ({"patch": 10**9}, "count.patch"),
        ({"buckets": []}, "count.buckets should be ascending"),
        ({"buckets": [4, 4]}, "count.buckets"),
        ({"buckets": [0, 4]}, "count.buckets"),
        ({"buckets": [4, 10**9]}, "count.buckets"),
        ({"buckets": [4.5]}, "count.buckets"),
        ({"code": "x"}, "should be a mapping of patch, buckets"),
    ],
)
def test_bad_blocks(change, message):
    plain = fit_counter(PICTURES, TRUE, 4, 36).plain() | change
    with pytest.raises(UserError, match=message) as caught:
        read_counter(plain, "count")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="should be a mapping"):
        read_counter([1], "count")

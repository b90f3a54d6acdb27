"""HoloV against a loop over crops, tokens and pairs, and what a reader would expect to see."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch

from tests.kit.reducer_data import best, cosine, run, signals
from vlmcompress.reducers import holov


def cuts(length, parts):
    """Where runs begin and end whose lengths differ by one at most, the longer ones first."""
    parts = min(parts, length)
    sizes = [length // parts + (part < length % parts) for part in range(parts)]
    return [(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(parts)]


def slow_tiles(grid, crops):
    frames, height, width = grid
    return [
        [(f * height + r) * width + c for r in range(*rows) for c in range(*columns)]
        for f in range(frames)
        for rows in cuts(height, crops)
        for columns in cuts(width, crops)
    ]


def slow_variance(features, i, crop):
    others = [cosine(features[i], features[j]) for j in crop if j != i]
    mean = sum(others) / max(1, len(others))
    return sum((one - mean) ** 2 for one in others) / max(1, len(others))


def slow_scores(features, saliency, crops, beta):
    variance = [0.0] * len(features)
    for crop in crops:
        for i in crop:
            variance[i] = slow_variance(features, i, crop)
    spread = sum(variance) / len(variance)
    variety = [one / spread for one in variance] if spread else [1.0] * len(variance)
    if saliency is None:
        return variety
    seen = sum(saliency) / len(saliency)
    return [(a / seen + beta * v) / (1 + beta) for a, v in zip(saliency, variety, strict=True)]


def slow_shares(scores, sizes, count, sharpness):
    """Full crops are set aside one by one, the fullest first; the rest is rounded by largest remainder."""
    worth = {p: sizes[p] * math.exp(sharpness * scores[p]) for p in range(len(sizes))}
    quota, left = {}, count
    while worth:
        exact = {p: left * worth[p] / sum(worth.values()) for p in worth}
        full = max(worth, key=lambda p: exact[p] / sizes[p])
        if exact[full] < sizes[full]:
            break
        quota[full] = sizes[full]
        left -= sizes[full]
        del worth[full]
    if worth:
        quota |= {p: math.floor(exact[p]) for p in worth}
        for p in sorted(worth, key=lambda p: (quota[p] - exact[p], p))[: count - sum(quota.values())]:
            quota[p] += 1
    return [quota[p] for p in range(len(sizes))]


def slow(s, chosen):
    crops = slow_tiles(s.grid, chosen.crops)
    saliency = None if s.saliency is None else s.saliency.tolist()
    scores = slow_scores(s.features, saliency, crops, chosen.beta)
    means = [sum(scores[i] for i in crop) / len(crop) for crop in crops]
    quotas = slow_shares(means, [len(crop) for crop in crops], holov.budget(s.grid, chosen), chosen.sharpness)
    kept: list[int] = []
    for crop, quota in zip(crops, quotas, strict=True):
        kept += [crop[k] for k in best([scores[i] for i in crop], quota)]
    return sorted(kept)


GRIDS = [(1, 8, 12), (1, 7, 5), (1, 3, 11), (1, 1, 9), (3, 4, 5)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("keep", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("given", [{}, {"crops": 2, "beta": 1.0}, {"crops": 3, "sharpness": 5.0}, {"crops": 1}])
@pytest.mark.parametrize("attention", [True, False])
def test_crops_share_the_budget_and_keep_their_best(grid, keep, given, attention):
    s, chosen = signals(grid), holov.Options(keep=keep, **given)
    s = s if attention else dataclasses.replace(s, saliency=None)
    assert run("holov", s, chosen).anchor.tolist() == slow(s, chosen)


@pytest.mark.parametrize("grid", [*GRIDS, (1, 24, 24), (1, 1, 1), (2, 5, 2)])
@pytest.mark.parametrize("crops", [1, 2, 4, 7])
def test_tiles(grid, crops):
    found = [tile.tolist() for tile in holov.tiles(grid, crops)]
    assert found == slow_tiles(grid, crops) and all(found)
    assert sorted(sum(found, [])) == [*range(math.prod(grid))]


def test_a_lively_crop_gets_more_and_no_crop_nothing():
    """Eight by eight tokens, all alike but for the upper left quarter; half the budget would fill that quarter twice."""
    features = torch.ones(8, 8, 6)
    features[:4, :4] = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(0))
    s = dataclasses.replace(signals((1, 8, 8)), features=features.view(64, 6), saliency=None)
    kept = run("holov", s, holov.Options(keep=0.5, crops=2)).anchor
    rows, columns = kept // 8, kept % 8
    inside = (rows < 4) & (columns < 4)
    assert inside.sum() == 16 and (~inside).sum() == 16
    for top in (0, 4):
        for left in (0, 4):
            assert ((rows // 4 * 4 == top) & (columns // 4 * 4 == left)).sum() >= 5


def test_without_sharpness_crops_get_what_they_are_large():
    kept = run("holov", signals((1, 8, 8)), holov.Options(keep=0.25, crops=4, sharpness=0)).anchor
    assert torch.bincount(kept // 16 * 4 + kept % 8 // 2).tolist() == [1] * 16


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 100.0])
def test_shares_are_exact_and_within_their_crops(sharpness):
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        sizes = torch.randint(1, 9, (16,), generator=draw).tolist()
        scores = (40 * torch.rand(16, generator=draw)).tolist()
        for count in range(1, sum(sizes) + 1, 5):
            found = holov.shared(scores, sizes, count, sharpness)
            assert sum(found) == count and all(0 <= one <= size for one, size in zip(found, sizes, strict=True))


def test_shares_of_equal_crops_by_hand():
    assert holov.shared([1.0] * 3, [4, 4, 4], 7, 1.0) == [3, 2, 2]
    assert holov.shared([math.log(3), 0.0], [10, 10], 8, 1.0) == [6, 2]
    assert holov.shared([math.log(3), 0.0], [4, 10], 8, 1.0) == [4, 4]
    assert holov.shared([5.0, 5.0], [2, 6], 4, 9.0) == [1, 3]
    assert holov.shared([0.0, 1e9], [3, 3], 4, 100.0) == [1, 3]
    assert holov.shared([0.0], [5], 5, 1.0) == [5]


def test_variance_of_three_tokens_by_hand():
    features = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    half = Fraction(1, 8)  # of the cosines 0 and 1/sqrt(2)
    scores = holov.scored(features, None, [torch.arange(3)], 0.0)
    torch.testing.assert_close(scores, torch.tensor([float(half), float(half), 0.0]) / (2 * float(half) / 3))


def test_identical_tokens_and_attention_are_all_alike():
    crops = holov.tiles((1, 6, 8), 4)
    for rows in (torch.ones(48, 12), torch.zeros(48, 12), torch.full((48, 12), 0.1)):
        for saliency in (None, torch.zeros(48), torch.ones(48)):
            assert holov.scored(rows, saliency, crops, 0.09).unique().numel() == 1


def test_half_precision():
    s, chosen = signals(), holov.Options(keep=0.3)
    narrow = dataclasses.replace(s, features=s.features.half(), saliency=s.saliency.half())
    wide = dataclasses.replace(s, saliency=s.saliency.half().float())
    assert torch.equal(run("holov", narrow, chosen).anchor, run("holov", wide, chosen).anchor)


@pytest.mark.parametrize("name", ["beta", "sharpness"])
@pytest.mark.parametrize("value", [-1, 101, math.nan, "much", True])
def test_numbers_that_are_none_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number from 0 to 100"):
        holov.Options(**{name: value})


def test_there_is_a_crop():
    with pytest.raises(ValueError, match="crops must be a whole number of at least 1"):
        holov.Options(crops=0)

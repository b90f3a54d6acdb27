"""SCOPE against its definition, every candidate tried in every step, and what a reader would expect to see."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.kit.reducer_data import best, cosine, options, run, signals
from vlmcompress.reduction.methods import scope


def covered(table, kept):
    return sum(max([0.0, *(row[j] for j in kept)]) for row in table)


def slow(features, saliency, alpha, count):
    """Always the token whose gain of coverage times saliency^alpha is largest, the first of those that are as good as equal."""
    table = [[cosine(x, y) for y in features] for x in features]
    kept: list[int] = []
    while len(kept) < count:
        before = covered(table, kept)
        free = [j for j in range(len(features)) if j not in kept]
        gain = {j: (covered(table, [*kept, j]) - before) * saliency[j] ** alpha for j in free}
        kept.append(next(j for j in free if gain[j] >= max(gain.values()) * (1 - scope.SLACK)))
    return kept


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("grid", [(1, 5, 6), (1, 3, 11), (2, 4, 3)])
def test_gain_times_saliency(grid, keep, alpha):
    s, chosen = signals(grid), scope.Options(keep=keep, alpha=alpha)
    expected = slow(s.features, s.saliency.tolist(), alpha, chosen.budget(grid))
    assert run("scope", s, chosen).anchor.tolist() == sorted(expected)


def test_without_saliency_it_is_coverage_alone():
    s = dataclasses.replace(signals((1, 5, 6)), saliency=None)
    expected = sorted(slow(s.features, [1.0] * 30, 1.0, 12))
    assert run("scope", s, scope.Options(keep=0.4)).anchor.tolist() == expected
    assert run("scope", signals((1, 5, 6)), scope.Options(keep=0.4, alpha=0)).anchor.tolist() == expected


def test_two_tokens_that_cover_only_each_other_are_taken_by_index():
    """Rounding makes one gain a little larger here; the other one stands first."""
    wide = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.3], [0.0, 1.0, -0.31]])
    for order in ([0, 1, 2], [0, 2, 1]):
        for scale in (1.0, 0.1, 3.0):
            assert scope.select(wide[order] * scale, None, 2).tolist() == [1, 0]


def test_tokens_that_differ_in_all_ways_are_taken_by_saliency():
    saliency = torch.tensor([0.3, 0.1, 0.5, 0.2, 0.4])
    assert scope.select(torch.eye(5), scope.emphasis(saliency, 1.0), 5).tolist() == best(saliency.tolist(), 5)


def test_the_tiny_attention_of_a_large_image_is_not_lost():
    """As published it would be 1e-40 and less, which float32 holds as 0, or hardly."""
    saliency = signals().saliency
    for factor in (2.0**-100, 2.0**60):
        assert torch.equal(scope.emphasis(saliency * factor, 3.0), scope.emphasis(saliency, 3.0))
    assert torch.equal(scope.emphasis(torch.zeros(4), 0.0), torch.ones(4))


def test_of_two_kinds_the_second_comes_before_a_copy_of_the_more_salient_first():
    features = torch.tensor([[1.0, 0.0]] * 5 + [[0.0, 1.0]])
    weight = scope.emphasis(torch.tensor([1.0, 9.0, 8.0, 7.0, 6.0, 0.01]), 1.0)
    assert scope.select(features, weight, 3).tolist() == [1, 5, 0]  # then gains are 0 and the index decides


def test_identical_and_empty_tokens_are_kept_to_the_exact_count():
    for features in (torch.ones(48, 12), torch.zeros(48, 12)):
        for saliency in (None, torch.zeros(48), signals().saliency):
            s = dataclasses.replace(signals(), features=features, saliency=saliency)
            assert len(run("scope", s, options("scope", keep=0.5)).anchor) == 24


def test_half_precision_attention():
    s, chosen = signals(), scope.Options(keep=0.3)
    narrow = dataclasses.replace(s, features=s.features.half(), saliency=s.saliency.half())
    wide = dataclasses.replace(s, saliency=s.saliency.half().float())
    assert torch.equal(run("scope", narrow, chosen).anchor, run("scope", wide, chosen).anchor)


@pytest.mark.parametrize("alpha", [-1, 101, math.nan, math.inf, "much", True])
def test_powers_that_are_none_are_refused(alpha):
    with pytest.raises(ValueError, match="alpha must be a number from 0 to 100"):
        scope.Options(alpha=alpha)

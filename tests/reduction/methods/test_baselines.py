"""Pooling and coverage, against definitions that are slow or somebody else's."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from tests.kit.reducer_data import cosine, options, run, signals
from vlmcompress.reduction.methods import coverage, pool
from vlmcompress.reduction.methods._selecting import cover


@pytest.mark.parametrize("grid", [(1, 6, 8), (1, 7, 5), (3, 4, 5), (1, 1, 9)])
@pytest.mark.parametrize("window", ["2x2", "1x2", "3x1", "3x3", "9x9", "1x1"])
def test_pool_is_average_pooling(window, grid):
    """Oracle: torch's own average pooling, windows at the edges as small as they are."""
    s, chosen = signals(grid), pool.Pool(window=window)
    image = s.features.view(*grid, -1).permute(0, 3, 1, 2)
    means = F.avg_pool2d(image, chosen.sides, ceil_mode=True, count_include_pad=False)
    result = run(chosen, s)
    torch.testing.assert_close(result.apply(s.features), means.permute(0, 2, 3, 1).flatten(0, 2))
    assert len(result.anchor) == chosen.budget(grid) and (result.target >= 0).all()


def test_a_window_stands_where_its_middle_is():
    assert run(pool.Pool(window="3x3"), signals((1, 5, 7))).anchor.tolist() == [8, 11, 13, 22, 25, 27]
    assert run(pool.Pool(), signals((1, 2, 4))).anchor.tolist() == [0, 2]


@pytest.mark.parametrize("window", ["2", "0x2", "2x", "2x2x2", "65x1", "a", "100x1", 4])
def test_bad_windows_are_refused(window):
    with pytest.raises(ValueError, match="window must be"):
        pool.Pool(window=window)


def slow_scores(features, temperature):
    """Token by token: the softmax of the cosines."""
    table = []
    for x in features:
        powers = [math.exp(cosine(x, y) / temperature) for y in features]
        table.append([power / sum(powers) for power in powers])
    return table


def covered(scores, kept):
    return sum(max(row[j] for j in kept) for row in scores)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
def test_coverage_adds_what_covers_most(keep, temperature):
    """Oracle: every candidate tried in every step, in float64. Rounding decides between those that are as good to 1e-5."""
    s = signals((1, 5, 6))
    scores, kept = slow_scores(s.features, temperature), []
    count = coverage.Coverage(keep=keep).budget(s.grid)
    for token in cover(coverage.represented(s.features, temperature), count).tolist():
        best = max(covered(scores, [*kept, j]) for j in range(30) if j not in kept)
        kept.append(token)
        assert covered(scores, kept) > best - 1e-5
    reduction = run(options("coverage", keep=keep, temperature=temperature), s)
    assert reduction.anchor.tolist() == sorted(set(kept)) and len(kept) == count


@pytest.mark.parametrize("seed", range(4))
def test_coverage_is_near_the_best_of_all_choices(seed):
    """Nemhauser, Wolsey and Fisher's bound, and on images this small much closer."""
    features = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
    scores = slow_scores(features, 0.2)
    best = max(covered(scores, kept) for kept in itertools.combinations(range(10), 4))
    greedy = covered(scores, cover(coverage.represented(features, 0.2), 4).tolist())
    assert (1 - 1 / math.e) * best < 0.95 * best <= greedy <= best + 1e-6


def test_coverage_takes_one_of_many_alike_before_one_that_stands_alone():
    features = torch.tensor([[0.0, 1.0], *[[1.0, 0.01 * i] for i in range(9)]])
    assert cover(coverage.represented(features, 0.2), 1).item() > 0
    assert set(cover(coverage.represented(features, 0.2), 2).tolist()) >= {0}


def test_bad_temperatures_are_refused():
    for temperature in (0, -1, math.inf, math.nan, "warm", True):
        with pytest.raises(ValueError, match="temperature must be a number"):
            coverage.Coverage(temperature=temperature)

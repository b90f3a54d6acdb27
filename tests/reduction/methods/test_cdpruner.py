"""CDPruner against determinants of submatrices in float64, and what a reader would expect to see."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit.reducer_data import cosine, run, signals
from vlmcompress.reduction.methods import cdpruner


def slow(features, count):
    """Always the token with which the kernel's part has the largest determinant, each one computed anew."""
    n = len(features)
    likeness = torch.tensor([[cosine(a, b) for b in features] for a in features], dtype=torch.float64)
    likeness.fill_diagonal_(1.0)  # exactly: the first choice is a tie
    kernel = likeness + cdpruner.DIAGONAL * torch.eye(n, dtype=torch.float64)
    kept: list[int] = []
    while len(kept) < count:
        volume = {}
        for j in set(range(n)) - set(kept):
            part = torch.tensor([*kept, j])
            sign, volume[j] = torch.linalg.slogdet(kernel[part][:, part])
            assert sign > 0 or volume[j] == -math.inf
        kept.append(max(volume, key=lambda j: (volume[j].item(), -j)))
    return kept


@pytest.mark.parametrize("keep", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("grid", [(1, 6, 8), (1, 7, 5), (3, 2, 7)])
def test_the_determinant_is_raised_most(keep, grid):
    """48 tokens of 12 dimensions: at half of them most lie in the span of the others, but for what is their own."""
    s, chosen = signals(grid), cdpruner.CDPruner(keep=keep)
    expected = slow(s.features, chosen.budget(grid))
    assert run(chosen, s).anchor.tolist() == sorted(expected)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_the_choice(seed):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(30, 40, generator=generator)
    assert cdpruner.select(features, 20).tolist() == slow(features, 20)


def test_every_kind_comes_before_a_second_of_any():
    features = torch.eye(4).repeat_interleave(5, 0)
    chosen = cdpruner.select(features, 20).tolist()
    assert sorted(index // 5 for index in chosen[:4]) == [0, 1, 2, 3] and sorted(chosen) == [*range(20)]

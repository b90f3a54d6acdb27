"""CDPruner against determinants of submatrices in float64, and what a reader would expect to see."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit.reducer_data import cosine, run, signals
from vlmcompress.reduction.choice import parse
from vlmcompress.reduction.methods import cdpruner


def slow(features, relevance, count):
    """Always the token with which the kernel's part has the largest determinant, each one computed anew."""
    n = len(features)
    likeness = torch.tensor([[cosine(a, b) for b in features] for a in features], dtype=torch.float64)
    likeness.fill_diagonal_(1.0)  # exactly: the first choice is a tie where all are equally relevant
    likeness += cdpruner.OWN * torch.eye(n, dtype=torch.float64)
    r = torch.tensor(relevance, dtype=torch.float64)
    kernel = r[:, None] * likeness * r
    kept: list[int] = []
    while len(kept) < count:
        volume = {}
        for j in set(range(n)) - set(kept):
            part = torch.tensor([*kept, j])
            sign, volume[j] = torch.linalg.slogdet(kernel[part][:, part])
            assert sign > 0 or volume[j] == -math.inf
        kept.append(max(volume, key=lambda j: (volume[j].item(), -j)))
    return kept


def slow_relevance(features, query):
    match = [sum(cosine(x, word) for word in query) / len(query) for x in features]
    return [(score - min(match)) / (max(match) - min(match)) for score in match]


@pytest.mark.parametrize("keep", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("grid", [(1, 6, 8), (1, 7, 5), (3, 2, 7)])
@pytest.mark.parametrize("relevance", ["none", "question"])
def test_the_determinant_is_raised_most(keep, grid, relevance):
    """48 tokens of 12 dimensions: at half of them most lie in the span of the others, but for what is their own."""
    s, chosen = signals(grid), cdpruner.Options(keep=keep, relevance=relevance)
    worth = slow_relevance(s.features, s.query) if relevance == "question" else [1.0] * s.n
    expected = slow(s.features, worth, cdpruner.budget(grid, chosen))
    assert run("cdpruner", s, chosen).anchor.tolist() == sorted(expected)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_the_choice(seed):
    generator = torch.Generator().manual_seed(seed)
    features, relevance = torch.randn(30, 40, generator=generator), torch.rand(30, generator=generator)
    assert cdpruner.select(features, relevance, 20).tolist() == slow(features, relevance.tolist(), 20)


def test_every_kind_comes_before_a_second_of_any():
    features = torch.eye(4).repeat_interleave(5, 0)
    chosen = cdpruner.select(features, torch.ones(20), 20).tolist()
    assert sorted(index // 5 for index in chosen[:4]) == [0, 1, 2, 3] and sorted(chosen) == [*range(20)]


def test_what_is_relevant_comes_first_and_what_is_not_comes_last():
    features, query = torch.eye(6), torch.tensor([[0.0, 0.0, 3.0, 0.0, 0.0, -1.0]])
    relevance = cdpruner.relevant(features, query)
    torch.testing.assert_close(relevance, torch.tensor([0.25, 0.25, 1.0, 0.25, 0.25, 0.0]))
    assert cdpruner.select(features, relevance, 6).tolist() == [2, 0, 1, 3, 4, 5]


def test_options():
    assert parse("cdpruner:0.5,relevance=question").plain() == {
        "method": "cdpruner",
        "keep": 0.5,
        "relevance": "question",
    }

"""Coverage of the question's words: the greedy choice against the formula in float64, and what a reader would expect to see."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tests.kit.reducer_data import cosine, run, signals
from vlmcompress.reduction.choice import parse
from vlmcompress.reduction.methods import coverage


def softmax(values, temperature):
    powers = [math.exp((value - max(values)) / temperature) for value in values]
    return [power / sum(powers) for power in powers]


class Slow:
    """The published objective, term by term in Python's floats."""

    def __init__(self, features, query, chosen):
        self.tokens = [softmax([cosine(x, y) for y in features], chosen.temperature) for x in features]
        self.words = [softmax([cosine(t, y) for y in features], chosen.text_temperature) for t in query]
        self.weight = chosen.weight

    def __call__(self, kept):
        tokens, words = ([max(row[j] for j in kept) for row in table] for table in (self.tokens, self.words))
        return sum(tokens) / len(tokens) + self.weight * sum(words) / len(words)

    def greedy(self, count):
        kept = []
        for _ in range(count):
            others = [j for j in range(len(self.tokens)) if j not in kept]
            kept.append(max(others, key=lambda j: (self([*kept, j]), -j)))
        return kept


@pytest.mark.parametrize("keep", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("weight", [0.1, 2.0, 50.0])
@pytest.mark.parametrize("text_temperature", [0.02, 0.2])
def test_always_the_token_that_adds_most(keep, weight, text_temperature):
    """Oracle: every candidate tried in every step."""
    s = signals((1, 5, 6))
    chosen = coverage.Options(keep=keep, relevance="question", weight=weight, text_temperature=text_temperature)
    expected = Slow(s.features, s.query, chosen).greedy(coverage.budget(s.grid, chosen))
    assert run("coverage", s, chosen).anchor.tolist() == sorted(expected)


def drawn(seed, n=10, words=3):
    """An image of a row of tokens, and a question."""
    generator = torch.Generator().manual_seed(seed)
    features, query = torch.randn(n, 6, generator=generator), torch.randn(words, 6, generator=generator)
    return dataclasses.replace(signals((1, 1, n)), features=features, query=query, **NOTHING)


NOTHING = {"keys": None, "heads": None, "saliency": None, "windowed": None, "pixels": None}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weight", [0.5, 2.0, 10.0])
def test_near_the_best_of_all_choices(seed, weight):
    """Nemhauser, Wolsey and Fisher's bound; both terms are submodular, and so is their weighted sum."""
    s, chosen = drawn(seed), coverage.Options(keep=0.4, relevance="question", weight=weight)
    worth = Slow(s.features, s.query, chosen)
    best = max(map(worth, itertools.combinations(range(10), 4)))
    greedy = worth(run("coverage", s, chosen).anchor.tolist())
    assert (1 - 1 / math.e) * best <= greedy <= best + 1e-12


def test_both_terms_have_a_say():
    """Two kinds of tokens, nine of one and a single other, which a word is about or not."""
    features = torch.tensor([[0.0, 1.0], *[[1.0, 0.01 * i] for i in range(9)]])
    s = dataclasses.replace(drawn(0), features=features)
    for query, weight, first in (
        (torch.tensor([[0.0, 1.0]]), 2.0, True),
        (torch.tensor([[0.0, 1.0]]), 0.001, False),
        (torch.tensor([[1.0, 0.04]]), 2.0, False),
    ):
        queried = dataclasses.replace(s, query=query)
        kept = run("coverage", queried, coverage.Options(keep=0.1, relevance="question", weight=weight)).anchor.tolist()
        assert (kept == [0]) is first


def test_how_often_a_question_says_the_same_changes_nothing():
    """Words count as a mean, so a long question weighs as much as a short one."""
    s, asking = signals(), coverage.Options(keep=0.3, relevance="question")
    longer = dataclasses.replace(s, query=s.query.repeat(4, 1))
    assert torch.equal(run("coverage", s, asking).anchor, run("coverage", longer, asking).anchor)


def test_options():
    """A recipe or a checkpoint that does not ask says nothing of the question, so older versions can read it."""
    assert parse("coverage:0.5").plain() == {"method": "coverage", "keep": 0.5, "temperature": 0.2}
    asking = parse("coverage:0.5,relevance=question,weight=3")
    assert asking.plain() == {
        "method": "coverage",
        "keep": 0.5,
        "temperature": 0.2,
        "relevance": "question",
        "weight": 3.0,
    }
    assert parse(str(asking)) == asking


@pytest.mark.parametrize("weight", [0, -1, 1001, math.inf, math.nan, "much", True])
def test_weights_that_are_none_are_refused(weight):
    with pytest.raises(ValueError, match="weight must be a number above 0 and at most 1000, got "):
        coverage.Options(weight=weight)


def test_other_values_that_are_none_are_refused():
    for temperature in (0, math.nan, "warm", True):
        with pytest.raises(ValueError, match="text_temperature must be a number of at least 0.001"):
            coverage.Options(text_temperature=temperature)

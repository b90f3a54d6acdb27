"""Coverage: the greedy choice against the formula in Python's floats."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tests.kit.reducer_data import cosine, run, signals
from vlmcompress.reduction.methods import coverage


def softmax(values):
    powers = [math.exp((value - max(values)) / 0.2) for value in values]
    return [power / sum(powers) for power in powers]


class Slow:
    """The objective, term by term in Python's floats."""

    def __init__(self, features):
        self.tokens = [softmax([cosine(x, y) for y in features]) for x in features]

    def __call__(self, kept):
        return sum(max(row[j] for j in kept) for row in self.tokens)

    def greedy(self, count):
        kept = []
        for _ in range(count):
            others = [j for j in range(len(self.tokens)) if j not in kept]
            kept.append(max(others, key=lambda j: (self([*kept, j]), -j)))
        return kept


@pytest.mark.parametrize("keep", [0.1, 0.4, 0.8])
def test_always_the_token_that_adds_most(keep):
    """Oracle: every candidate tried in every step."""
    s, chosen = signals((1, 5, 6)), coverage.Coverage(keep=keep)
    expected = Slow(s.features).greedy(chosen.budget(s.grid))
    assert run(chosen, s).anchor.tolist() == sorted(expected)


NOTHING = {"keys": None, "heads": None, "saliency": None, "windowed": None}


@pytest.mark.parametrize("seed", range(4))
def test_near_the_best_of_all_choices(seed):
    """Nemhauser, Wolsey and Fisher's bound."""
    features = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
    s = dataclasses.replace(signals((1, 1, 10)), features=features, **NOTHING)
    chosen = coverage.Coverage(keep=0.4)
    scores = Slow(s.features)
    best = max(map(scores, itertools.combinations(range(10), 4)))
    assert (1 - 1 / math.e) * best <= scores(run(chosen, s).anchor.tolist()) <= best + 1e-12

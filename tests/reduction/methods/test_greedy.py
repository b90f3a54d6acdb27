"""Greedy choices as they are computed against the same choice made one token at a time, over many images, with ties."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kit.reducer_data import features as image
from vlmcompress.reduction.methods import _selecting as selecting
from vlmcompress.reduction.methods import coverage, dart, divprune
from vlmcompress.reduction.methods._base import top, unit


def exact_cover(features: torch.Tensor, count: int) -> list[int]:
    """Coverage's choice in float64, where copies are alike to the last bit: cosines are taken between kinds of tokens."""
    kinds, kind = torch.unique(features, dim=0, return_inverse=True)
    rows = torch.nn.functional.normalize(kinds.double())
    scores = ((rows @ rows.T)[kind][:, kind] / 0.2).softmax(1)
    best, kept = torch.zeros(len(features), dtype=torch.float64), list[int]()
    for _ in range(count):
        gain = (scores - best[:, None]).clamp(min=0).sum(0)
        gain[kept] = -1
        kept.append(int((gain >= gain.max() * (1 - 1e-12)).nonzero()[0]))
        best = torch.maximum(best, scores[:, kept[-1]])
    return kept


def stepwise(monkeypatch, *arguments):
    """`cover` as it is on a device that is neither a CPU nor a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(
            selecting, "lazily", lambda *image: selecting.stepwise(*(x[None] for x in image[:3]), *image[3:])[0]
        )
        return selecting.cover(*arguments)


@pytest.mark.parametrize("seed", range(20))  # each kind of image (seed % 5) with each count (seed % 4) and lead
def test_cover_is_the_same_lazily_and_step_by_step(seed, monkeypatch):
    draw = torch.Generator().manual_seed(seed)
    rows = unit(image(seed))
    table = [rows @ rows.T, coverage.represented(rows), coverage.represented(rows)[:7]][seed % 3]
    covered = torch.randperm(len(rows), generator=draw)[: seed // 4 % 2 * 5]
    count = [1, 9, 30, 40][seed % 4]
    chosen = selecting.cover(table, count, covered)
    assert chosen.tolist() == stepwise(monkeypatch, table, count, covered).tolist()
    assert len({*chosen.tolist(), *covered.tolist()}) == count + len(covered)


@pytest.mark.parametrize("seed", range(10))
def test_of_tokens_that_are_alike_the_first_is_kept(seed):
    """The number of tokens is none that vector instructions divide, which would add up the last ones' gains in other order."""
    features = image(seed)
    assert selecting.cover(coverage.represented(features), 20).tolist() == exact_cover(features, 20)


def divprune_steps(features, count):
    rows = unit(features)
    distance = 1 - rows @ rows.T
    kept = [int(distance.clone().fill_diagonal_(torch.inf).amin(0).argmax())]
    while len(kept) < count:
        nearest = distance[kept].amin(0)
        nearest[kept] = -torch.inf
        kept.append(int(nearest.argmax()))
    return kept


def dart_steps(features, query, pivots, count):
    kept = pivots[:count].tolist()
    turns = torch.cat([unit(features)[kept], unit(query)]) @ unit(features).T
    for turn, cosines in enumerate(turns):
        quota = (count - len(pivots[:count])) // len(turns) + (turn < (count - len(pivots[:count])) % len(turns))
        cosines[kept] = torch.inf
        kept += cosines.sort(stable=True).indices[:quota].tolist()
    return sorted(kept)


@pytest.mark.parametrize("seed", range(20))  # each kind of image (seed % 5) with each count (seed % 4)
def test_divprune_and_dart_are_the_same_a_token_at_a_time(seed):
    features = image(seed, width=60)
    count = [1, 5, 22, 40][seed % 4]
    assert divprune.select(features, count).tolist() == divprune_steps(features, count)
    for pivots, words in itertools.product((1, 4, 20), (0, 3)):
        lead, query = top(features.abs().sum(1), pivots), features[:words] + 1
        assert sorted(dart.select(features, query, lead, count).tolist()) == dart_steps(features, query, lead, count)

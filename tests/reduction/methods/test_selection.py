"""Methods that keep some tokens as they are, against the papers' definitions written as loops."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
from pathlib import Path

import pytest
import torch

from tests.kit.reducer_data import best, cosine, options, run, signals
from vlmcompress.reduction import methods
from vlmcompress.reduction.methods import REGISTRY, dart, divprune, evs, fastv, uniform


def length(rows):
    return [sum(abs(value) for value in row) for row in rows.double().tolist()]


def slow_dart(features, query, lead, ask, count):
    """In turns: a pivot takes its share of the tokens still free, those with the lowest cosine to it."""
    kept = list(lead[:count])
    pivots = [features[i] for i in kept] + [query[i] for i in ask]
    picks = count - len(kept)
    for turn, pivot in enumerate(pivots):
        quota = picks // len(pivots) + (1 if turn < picks % len(pivots) else 0)
        free = [i for i in range(len(features)) if i not in kept]
        free.sort(key=lambda i: (cosine(pivot, features[i]), i))
        kept += free[:quota]
    return sorted(kept)


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("seed", [0, 1])
def test_dart(keep, seed):
    s, chosen = signals(seed=seed), options("dart", keep=keep, pivots=4)
    expected = slow_dart(s.features, s.query, best(length(s.features), 4), [], chosen.budget(s.grid))
    assert run(chosen, s).anchor.tolist() == expected


@pytest.mark.parametrize(("keep", "pivots"), [(0.02, 1), (0.25, 10), (0.5, 19)])
def test_four_in_five_of_the_tokens_that_dart_keeps_are_pivots_by_default(keep, pivots):
    s = signals()
    count = dart.Dart(keep=keep).budget(s.grid)
    expected = slow_dart(s.features, s.query, best(length(s.features), pivots), [], count)
    assert run(dart.Dart(keep=keep), s).anchor.tolist() == expected


@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_dart_within_the_language_model_chooses_pivots_by_keys(keep):
    s, chosen = signals(), options("dart-llm", keep=keep)
    lead, ask = best(length(s.keys), 4), best(length(s.query_keys), 4)
    assert lead != best(length(s.features), 4)
    count = chosen.budget(s.grid)
    assert run(chosen, s).anchor.tolist() == slow_dart(s.features, s.query, lead, ask, count)


def test_dart_keeps_as_many_as_published_where_that_is_the_budget():
    """Published: 4 pivots and 8 times floor(ratio * n / 8) picks. 4 + 8 * 4 = 36 of 48 is such a number."""
    s, chosen = signals(), options("dart-llm", keep=36 / 48)
    lead, ask = best(length(s.keys), 4), best(length(s.query_keys), 4)
    kept = set(lead)
    for pivot in [s.features[i] for i in lead] + [s.query[i] for i in ask]:
        free = sorted((i for i in range(48) if i not in kept), key=lambda i: (cosine(pivot, s.features[i]), i))
        kept |= set(free[:4])
    assert run(chosen, s).anchor.tolist() == sorted(kept)


def test_dart_without_text_after_the_image():
    s = signals()
    none = dict.fromkeys(("query", "query_keys"), s.query[:0])
    assert len(run(options("dart-llm", keep=0.5), type(s)(**vars(s) | none)).anchor) == 24


def test_dart_drops_duplicates_of_a_pivot():
    """One pivot and its copies among tokens that differ: no copy is kept while anything else is left."""
    features = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    features[3:9] = 10 * features[3]
    kept = dart.select(features, features[:0], torch.tensor([3]), 15)
    assert set(kept.tolist()) == {3, *range(3), *range(9, 20)}  # 14 others differ


def slow_divprune(features, count):
    """First the token farthest from its nearest neighbour, then always the one farthest from its nearest kept one."""
    n = len(features)
    distance = [[1 - cosine(features[i], features[j]) for j in range(n)] for i in range(n)]
    first = max(range(n), key=lambda i: min(distance[i][j] for j in range(n) if j != i))
    kept = [first]
    while len(kept) < count:
        free = [i for i in range(n) if i not in kept]
        kept.append(max(free, key=lambda i: min(distance[i][j] for j in kept)))
    return kept


@pytest.mark.parametrize("seed", [0, 1])
def test_divprune(seed):
    features = signals(seed=seed).features
    assert divprune.select(features, 20).tolist() == slow_divprune(features, 20)


def test_divprune_is_within_its_bound_of_the_best_choice():
    features = signals((1, 2, 5)).features

    def smallest(kept):
        return min(1 - cosine(features[i], features[j]) for i, j in itertools.combinations(kept, 2))

    best = max(smallest(kept) for kept in itertools.combinations(range(10), 4))
    assert best / 4 <= smallest(divprune.select(features, 4).tolist()) <= best


def test_divprune_keeps_every_kind_before_a_second_of_any():
    features = torch.eye(4).repeat_interleave(5, 0)
    kinds = [i // 5 for i in divprune.select(features, 4).tolist()]
    assert sorted(kinds) == [0, 1, 2, 3]
    assert len(set(divprune.select(features, 9).tolist())) == 9  # only duplicates are left, and none is taken twice


def test_evs_keeps_the_first_frame_and_what_changes_most():
    """Oracles: each token against the one at its place a frame before; vLLM's own. An image is a first frame."""
    grid = (3, 4, 5)
    features = signals(grid).features
    change = [math.inf] * 20 + [1 - cosine(features[i], features[i - 20]) for i in range(20, 60)]
    spec = importlib.util.find_spec("vllm")
    file = Path(spec.submodule_search_locations[0]) / "multimodal/video_prune/evs.py"
    spec = importlib.util.spec_from_file_location("evs_in_vllm", file)
    vllms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vllms)
    for keep, count in ((0.75, 45), (0.5, 30), (0.1, 20)):
        kept = run(evs.EVS(keep=keep), signals(grid)).anchor.tolist()
        assert kept == sorted(best(change, count))
        assert kept == vllms.compute_retention_mask(features, grid, 1, 1 - keep).nonzero()[:, 0].tolist()
    assert len(run(evs.EVS(keep=0.1), signals((1, 6, 8))).anchor) == 48


def test_evs_of_a_share_that_is_no_token_keeps_the_first_frame():
    s, chosen = signals((4, 1, 2)), evs.EVS(keep=0.05)  # 0.4 of a token
    assert chosen.budget(s.grid) == 2 and not methods.too_small(chosen, s.grid)
    assert run(chosen, s).anchor.tolist() == [0, 1]
    assert methods.too_small(chosen, (1, 1, 2))  # of an image that is all


def test_fastv_keeps_the_most_attended():
    s = signals()
    assert run(fastv.FastV(keep=0.25), s).anchor.tolist() == sorted(best(s.saliency.tolist(), 12))


def test_random_follows_from_seed_and_grid_alone():
    draw = random.Random("3 (1, 6, 8)")
    scores = [draw.random() for _ in range(48)]
    assert run(options("random", keep=0.25, seed=3), signals()).anchor.tolist() == sorted(best(scores, 12))


def test_random_is_nested_and_depends_on_the_seed():
    few, half, other = (
        set(run(options("random", keep=keep, seed=seed), signals()).anchor.tolist())
        for keep, seed in ((0.2, 0), (0.5, 0), (0.5, 1))
    )
    assert few < half and half != other


def test_random_chooses_every_token_equally_often():
    counts = torch.zeros(48)
    for seed in range(400):
        counts[run(options("random", keep=0.5, seed=seed), signals()).anchor] += 1
    assert (counts - 200).abs().max() < 5 * 10  # five standard deviations of a fair coin


@pytest.mark.parametrize("grid", [(1, 4, 4), (2, 4, 4), (1, 8, 16)])
def test_uniform_is_the_regular_grid_where_it_divides(grid):
    kept = run(uniform.Uniform(keep=0.25), signals(grid)).anchor
    frames, rows, columns = grid
    places = itertools.product(range(frames), range(1, rows, 2), range(1, columns, 2))
    assert kept.tolist() == [(f * rows + r) * columns + c for f, r, c in places]


@pytest.mark.parametrize(
    ("rows", "columns", "count"), [(24, 24, 64), (24, 24, 100), (9, 31, 40), (40, 3, 17), (7, 7, 48)]
)
def test_uniform_leaves_no_hole(rows, columns, count):
    """Every token has a kept one as near as a square of 1/count of the image is wide, in rows and in columns."""
    kept = run(uniform.Uniform(keep=count / (rows * columns)), signals((1, rows, columns))).anchor.tolist()
    assert len(kept) == count
    reach = math.ceil(math.sqrt(rows * columns / count))
    for r, c in itertools.product(range(rows), range(columns)):
        assert min(max(abs(r - k // columns), abs(c - k % columns)) for k in kept) <= reach


def test_uniform_spreads_over_frames():
    kept = run(uniform.Uniform(keep=10 / 36), signals((4, 3, 3))).anchor
    assert sorted(torch.bincount(kept // 9, minlength=4).tolist()) == [2, 2, 3, 3]
    assert run(uniform.Uniform(keep=1 / 45), signals((5, 3, 3))).anchor.tolist() == [2 * 9 + 4]  # the centre


def test_methods_within_the_language_model_are_labelled_unserved():
    for name in REGISTRY.names():
        if REGISTRY.get(name).STAGE == "llm":
            assert not REGISTRY.get(name).SERVED

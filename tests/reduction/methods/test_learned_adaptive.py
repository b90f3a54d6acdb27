"""How many tokens `learned-adaptive` keeps, against its definition in loops, and the level that keeps a share on average."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kit.reducer_data import NETWORK, run, signals
from vlmcompress.reduction import methods as reducers
from vlmcompress.reduction.methods import REGISTRY, learned
from vlmcompress.reduction.methods.coverage import represented

ADAPTIVE = REGISTRY.get("learned-adaptive")


def chosen(**settings):
    return ADAPTIVE.Options(network=NETWORK, **settings)


def slow_shown(s) -> list[float]:
    """How much of the image the first tokens show, for each number of them: always the one that adds most, each tried."""
    table, kept, shares = represented(s.features, 0.2).double().tolist(), [], []
    every = sum(max(row) for row in table)
    while len(kept) < s.n:
        free = [j for j in range(s.n) if j not in kept]
        shown = {j: sum(max(row[i] for i in [*kept, j]) for row in table) / every for j in free}
        kept.append(max(free, key=lambda j: (round(shown[j], 6), -j)))
        shares.append(shown[kept[-1]])
    return shares


def busy(seed: int, distinct: int):
    """An image of `distinct` different tokens, each several times."""
    s = signals((1, 6, 8), seed)
    return dataclasses.replace(s, features=s.features[torch.arange(48) % distinct])


@pytest.mark.parametrize("grid", [(1, 5, 6), (1, 1, 1), (2, 3, 4)])
def test_what_is_shown_is_as_defined(grid, monkeypatch):
    s = signals(grid)
    monkeypatch.setattr(ADAPTIVE, "STEP", 7)
    shown = ADAPTIVE.shown(s, chosen())
    assert shown.tolist() == pytest.approx(slow_shown(s), abs=1e-5)
    assert shown[-1] == 1 and (shown.diff() >= 0).all()
    some = ADAPTIVE.shown(s, chosen(), 0.5)
    assert torch.equal(some, shown[: len(some)]) and len(some) == min(s.n, 7 * -(-ADAPTIVE.counted(shown, 0.5) // 7))


@pytest.mark.parametrize("level", [0, 0.3, 0.6, 0.9, 1])
def test_the_fewest_tokens_that_show_the_level(level):
    """Oracle: every number of tokens tried in turn; and which they are is `learned`'s choice of so many."""
    s = signals((1, 5, 6))
    shown = slow_shown(s)
    expected = next(m for m in range(1, 31) if shown[m - 1] >= level - 1e-6)
    kept = run("learned-adaptive", s, chosen(level=level)).anchor
    assert len(kept) == expected
    fixed = run("learned", s, learned.Options(keep=expected / 30, network=NETWORK)).anchor
    assert torch.equal(kept, fixed)


def test_a_plain_image_keeps_fewer():
    counts = [len(run("learned-adaptive", busy(1, distinct), chosen(level=0.8)).anchor) for distinct in (2, 8, 24, 48)]
    assert counts == sorted(counts) and len(set(counts)) == 4


@pytest.mark.parametrize("count", [1, 7, 48])
def test_a_count_is_met_whatever_the_level(count):
    for level in (None, 0.5):
        reduction = reducers.reduce(ADAPTIVE, signals(), chosen(level=level), count)
        expected = run("learned", signals(), learned.Options(keep=count / 48, network=NETWORK))
        assert torch.equal(reduction.anchor, expected.anchor)
    with pytest.raises(ValueError, match="49 of 48 tokens cannot be kept"):
        reducers.reduce(ADAPTIVE, signals(), chosen(), 49)


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_the_level_keeps_the_share_on_average(keep):
    """Oracle: of all the levels above which some image keeps one token more, the highest that keeps no more than the share."""
    images = [busy(seed, distinct) for seed, distinct in enumerate((3, 10, 20, 30, 48))] + [signals((1, 3, 5), 9)]
    curves = [ADAPTIVE.shown(image, chosen()) for image in images]

    def mean(level):
        shares = [
            next(m for m in range(1, s.n + 1) if c[m - 1] >= level) / s.n for s, c in zip(images, curves, strict=True)
        ]
        return sum(shares) / len(shares)

    fitting = [level for level in torch.cat(curves).tolist() if mean(level) <= keep + 1e-9]
    assert ADAPTIVE.level(curves, keep) == max(fitting, default=min(float(curve[0]) for curve in curves))


def test_levels_are_learnt_from_something():
    with pytest.raises(ValueError, match="at least one image"):
        ADAPTIVE.level([], 0.5)


@pytest.mark.parametrize("level", [float("nan"), -0.1, 1.1, float("inf"), True, "high"])
def test_a_level_that_is_none_is_refused(level):
    with pytest.raises(ValueError, match="level must be a share of an image, from 0 to 1, got"):
        ADAPTIVE.Options(level=level)


@pytest.mark.parametrize(
    ("missing", "text"),
    [({"level": 0.5}, "train one with `vlmcompress learn-reducer`"), ({"network": NETWORK}, "no level; learn it from")],
)
def test_what_is_missing_is_said(missing, text):
    with pytest.raises(ValueError, match=text):
        run("learned-adaptive", signals(), ADAPTIVE.Options(**missing))

"""The scorer of `learned` against its definition in loops, and what it keeps against every candidate tried."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit.reducer_data import WIDTH, best, options, run, signals
from vlmcompress.reduction.methods import learned
from vlmcompress.reduction.methods.coverage import represented

HIDDEN = 6


@pytest.fixture(scope="module")
def weights():
    """Numbers everywhere: what `initial` leaves at zero, too."""
    random = torch.Generator().manual_seed(3)
    shapes = learned.shapes(WIDTH, HIDDEN)
    tensors = {name: torch.randn(shape, generator=random) * 0.4 for name, shape in shapes.items()}
    return tensors | {"spread": tensors["spread"].abs() + 0.5}


def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def place(frame_rows, frame_columns, index):
    y, x = divmod(index % (frame_rows * frame_columns), frame_columns)
    at = [(y + 0.5) / frame_rows, (x + 0.5) / frame_columns]
    return at + [
        wave(2 * math.pi * 2**power * coordinate)
        for power in range(4)
        for wave in (math.sin, math.cos)
        for coordinate in at
    ]


def slow(weights, features, grid):
    """The module's formulas in Python's floats."""
    w = {name: value.double().tolist() for name, value in weights.items()}

    def times(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    x = [
        [(value - m) / s for value, m, s in zip(row, w["mean"], w["spread"], strict=True)]
        for row in features.double().tolist()
    ]
    mean = [sum(column) / len(x) for column in zip(*x, strict=True)]
    hidden = [
        [
            gelu(a + b + c + d)
            for a, b, c, d in zip(
                times(w["token"], row),
                w["bias"],
                times(w["image"], mean),
                times(w["place"], place(*grid[1:], i)),
                strict=True,
            )
        ]
        for i, row in enumerate(x)
    ]
    query, key = ([times(w[name], row) for row in hidden] for name in ("query", "key"))
    scores = []
    for i, token_row in enumerate(hidden):
        logits = [sum(a * b for a, b in zip(query[i], other, strict=True)) / math.sqrt(HIDDEN) for other in key]
        share = [math.exp(value - max(logits)) for value in logits]
        mixed = [sum(s * row[c] for s, row in zip(share, hidden, strict=True)) / sum(share) for c in range(HIDDEN)]
        attended = [a + b for a, b in zip(token_row, times(w["value"], mixed), strict=True)]
        scores.append(sum(a * gelu(b) for a, b in zip(w["output"], attended, strict=True)))
    return scores


@pytest.mark.parametrize("grid", [(1, 5, 6), (1, 1, 1), (2, 3, 4)])
def test_score_is_as_defined(weights, grid):
    s = signals(grid)
    scores = learned.score(weights, s.features, grid)
    torch.testing.assert_close(
        scores.double(), torch.tensor(slow(weights, s.features, grid)).double(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("cover", [0.0, 0.25, 1.0])
def test_the_best_and_what_covers_the_rest(weights, cover):
    """Oracle: the highest worths, then always the token that raises the coverage of all most, each candidate tried."""
    s = signals((1, 5, 6))
    values, table = slow(weights, s.features, s.grid), represented(s.features).tolist()
    count = 12
    kept = best(values, count - math.floor(cover * count + 0.5))
    while len(kept) < count:
        free = [j for j in range(30) if j not in kept]
        kept.append(max(free, key=lambda j: (sum(max(row[i] for i in [*kept, j]) for row in table), -j)))
    chosen = learned.Learned(keep=0.4, cover=cover, network=learned.Network(weights))
    assert run(chosen, s).anchor.tolist() == sorted(kept)


def test_what_is_not_kept_can_be_merged(weights):
    s = signals((1, 5, 6))
    both = [learned.Learned(keep=0.4, merge=merge, network=learned.Network(weights)) for merge in ("none", "nearest")]
    dropped, merged = (run(chosen, s) for chosen in both)
    assert torch.equal(dropped.anchor, merged.anchor) and (merged.target >= 0).sum() > (dropped.target >= 0).sum()


def test_a_network_begins_with_tokens_alone():
    """Untrained, no token looks at the others, and equal seeds give equal networks."""
    mean, spread = torch.randn(WIDTH), torch.rand(WIDTH)
    first, same, other = (learned.initial(mean, spread, HIDDEN, seed) for seed in (1, 1, 2))
    assert {name: tuple(value.shape) for name, value in first.items()} == learned.shapes(WIDTH, HIDDEN)
    assert all(torch.equal(first[name], same[name]) for name in first) and not torch.equal(
        first["token"], other["token"]
    )
    assert not first["value"].any() and torch.equal(first["mean"], mean)


def test_a_missing_network_names_a_remedy():
    with pytest.raises(ValueError, match="train one with `vlmcompress learn-reducer`"):
        run(learned.Learned(keep=0.4), signals())


def test_the_file_is_identified_by_its_hash():
    a, b = (learned.Learned(scorer=name, sha256="0" * 64) for name in ("a.safetensors", "b.safetensors"))
    assert a == b != learned.Learned(scorer="a.safetensors", sha256="1" * 64)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [({"cover": 2}, "cover must be a number"), ({"sha256": "xyz"}, "64 hex"), ({"scorer": 3}, "scorer")],
)
def test_options_that_are_not_right(wrong, text):
    with pytest.raises(ValueError, match=text):
        learned.Learned(**wrong)


def test_the_whole_budget_is_kept_at_every_share():
    for keep in (0.03, 0.1, 0.5, 0.97):
        chosen = options("learned", keep=keep)
        assert len(run(chosen, signals()).anchor) == chosen.budget((1, 6, 8))

"""An option of several methods: `merge: nearest`, by which the rest goes into what it is most like."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kit.reducer_data import cosine, options, run, signals
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.methods import REGISTRY
from vlmcompress.reduction.methods._selecting import SIMILAR, SelectingReducer

NAMES = [name for name in REGISTRY.names() if isinstance(REGISTRY.get(name), SelectingReducer)]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_means_of_a_chosen_token_and_those_most_like_it(name):
    """Oracle: a loop over the tokens, of which about half resemble another one that much."""
    s = signals((4, 3, 4) if name == "evs" else (1, 6, 8))
    s = dataclasses.replace(s, features=s.features + 3 * s.features[:1] * (torch.arange(s.n) % 2)[:, None])
    kept = run(options(name, keep=0.3), s).anchor.tolist()
    members = {index: [index] for index in kept}
    for i in set(range(s.n)) - set(kept):
        nearest = max(kept, key=lambda j: (cosine(s.features[i], s.features[j]), -j))
        if cosine(s.features[i], s.features[nearest]) >= SIMILAR:
            members[nearest].append(i)
    merged = run(options(name, keep=0.3, merge="nearest"), s)
    assert merged.anchor.tolist() == kept
    means = torch.stack([s.features[members[index]].mean(0) for index in kept])
    torch.testing.assert_close(merged.apply(s.features), means)
    assert len(kept) < sum(map(len, members.values())) < s.n == len(merged.target)
    assert int((merged.target >= 0).sum()) == sum(map(len, members.values()))


def test_there_are_methods_that_have_the_option():
    assert {"coverage", "dart", "divprune", "random", "uniform"} <= {*NAMES} and "fastv" not in NAMES


def test_features_are_needed():
    s = dataclasses.replace(signals(), features=None)
    assert len(run(options("random", keep=0.3), s).anchor) == 14
    with pytest.raises(ValueError, match="merge=nearest needs signals that are missing: features"):
        run(options("random", keep=0.3, merge="nearest"), s)


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="merge must be none or nearest"):
        SelectingReducer(merge="all")  # type: ignore[arg-type]


def test_a_recipe_names_the_options_only_where_they_are_used():
    assert parse_reducer("divprune:0.5").plain() == {"method": "divprune", "keep": 0.5}
    chosen = parse_reducer("divprune:0.5,merge=nearest")
    assert chosen.plain() == {"method": "divprune", "keep": 0.5, "merge": "nearest"}
    assert parse_reducer(str(chosen)) == chosen


def test_identical_and_empty_tokens_are_kept_to_the_exact_count():
    for features in (torch.ones(48, 12), torch.zeros(48, 12), torch.cat([torch.zeros(24, 12), torch.ones(24, 12)])):
        s = dataclasses.replace(signals(), features=features)
        for keep in (0.5, 0.9):
            assert len(run(options("coverage", keep=keep), s).anchor) == keep * 48 // 1


def test_half_precision():
    s, chosen = signals(), options("coverage", keep=0.3)
    narrow = dataclasses.replace(s, features=s.features.half())
    assert torch.equal(run(chosen, s).anchor, run(chosen, narrow).anchor)

"""Candidates: their names, recipe keys and files, which of them there are, and one that could not be written."""

from __future__ import annotations

import itertools

import pytest

from vlmcompress.evaluation.search.candidate import AS_IT_IS, Candidate, Choice, Factor, combined, digest, singles
from vlmcompress.evaluation.search.live_trials import LiveTrials
from vlmcompress.evaluation.search.trial import Setup
from vlmcompress.evaluation.search.trial_log import open_trial_log
from vlmcompress.utils import workers
from vlmcompress.utils.errors import UserError

INT8, FP8 = Choice("int8", {"scheme": "int8"}), Choice("fp8", {"scheme": "fp8"})
HALF = Choice("divprune 1/2", {"reduce": "divprune:0.5"})
LEARNED = Choice("learned 1/4", {"reduce": "learned:0.25"})
CACHE = Choice("fp8 cache", {"kv_cache": "fp8"})
FACTORS = [Factor("scheme", (INT8, FP8)), Factor("reduce", (HALF, LEARNED)), Factor("cache", (CACHE,))]


def test_a_candidate_describes_its_changes() -> None:
    both = Candidate((INT8, LEARNED))
    assert both.name == "int8 + learned 1/4"
    assert both.keys == {"scheme": "int8", "reduce": "learned:0.25"}
    assert both.plain() == {"name": both.name, "recipe": both.keys}
    assert Candidate((HALF,)).plain() == {"name": HALF.name, "recipe": {"scheme": "none", "reduce": "divprune:0.5"}}


def test_weights_stay_as_they_are_without_a_scheme() -> None:
    assert Candidate().name == AS_IT_IS and Candidate().keys == {"scheme": "none"}
    assert Candidate((HALF,)).keys["scheme"] == "none"


def test_each_change_alone_and_every_combination() -> None:
    """Oracle: all subsets of choices, without those that have two of one factor."""
    choices = {choice.name: factor.name for factor in FACTORS for choice in factor.choices}
    sets = [set(some) for size in range(1, 4) for some in itertools.combinations(choices, size)]
    allowed = [some for some in sets if len({choices[name] for name in some}) == len(some)]
    alone, joint = singles(FACTORS), combined(FACTORS)
    assert [candidate.name for candidate in alone] == list(choices)
    names = [{choice.name for choice in candidate.choices} for candidate in joint]
    assert len(names) == len(allowed) - len(alone) == 12
    assert all(some in names for some in allowed if len(some) > 1)
    assert len({candidate.folder for candidate in [*alone, *joint, Candidate()]}) == 18


def test_a_candidates_folder_depends_on_its_changes_alone() -> None:
    """Not on the name, not on the order of keys; but on the content of a reducer's file."""
    keys = {"reduce": "learned:0.25", "seed": 1}
    first, again = (
        Candidate((Choice(name, dict(some)),)) for name, some in (("a", keys), ("b", reversed(keys.items())))
    )
    assert first.folder == again.folder
    assert first.folder != Candidate((Choice("a", keys, file_hash="1"),)).folder
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})


def test_a_full_disk_is_no_fault_of_a_candidate(tmp_path):
    """The search ends, and tries the candidate again when it continues; here no file can be written at all."""
    (tmp_path / "file").write_text("")
    setup = Setup({"model": "model"}, None, None, 0, "hf", tmp_path / "file" / "work")
    with open_trial_log(tmp_path / "out", {}, None) as log:
        live = LiveTrials(setup, workers.of(None), log, gains=None, original=None)
        with pytest.raises(UserError, match="cannot write .*work: Not a directory"):
            live.ask([Candidate()], 48)
        assert log.trial(Candidate(), 48) is None

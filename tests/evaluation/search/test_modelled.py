"""Modelled gains of a search: exact for memory, and ordered as the roofline orders them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.places import DEMO_LLAVA
from vlmcompress.evaluation.search.candidate import Candidate, Choice
from vlmcompress.evaluation.search.search import SearchRequest, setup_of
from vlmcompress.evaluation.search.speed import USERS, Goal, Modelled, TypicalRequest

FP8 = Candidate((Choice("fp8", {"scheme": "fp8"}),))
W4 = Candidate((Choice("w4", {"scheme": "rtn", "options": {"group_size": 64}}),))
HALF = Candidate((Choice("half", {"reduce": "coverage:0.5"}),))


def modelled(goal: Goal, target: str) -> Modelled:
    request = SearchRequest({"model": str(DEMO_LLAVA), "target": target, "seed": 0}, Path("out"))
    return Modelled(setup_of(request), goal, TypicalRequest())


def test_gains_on_a_machine_that_is_not_here() -> None:
    """Small weights save memory and steps, but no arithmetic; FP8 and fewer tokens save both."""
    first, rate = modelled("ttft", "h100"), modelled("throughput", "h100")
    assert first.gain(W4) == pytest.approx(1.0) and (rate.gain(W4) or 0) > 1
    for candidate in (FP8, HALF):
        assert (first.gain(candidate) or 0) > 1.2 and (rate.gain(candidate) or 0) > 1
    memory = modelled("memory", "h100")
    before, after = memory.figures(Candidate()), memory.figures(HALF)
    assert before and after and before.weights == after.weights
    assert before.cache - after.cache == USERS * 40 * 2048  # of 81 tokens 41 stay
    assert modelled("ttft", "cpu").gain(FP8) is None, "its rates are unknown"

"""The result of a search as data: the winner, every candidate and why it lost, the Pareto front, the winner at the next
floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmcompress.evaluation.search.candidate import AS_IT_IS
from vlmcompress.evaluation.search.live_trials import SearchResult
from vlmcompress.evaluation.search.posterior import expected_gain
from vlmcompress.evaluation.search.successive_halving import LIKELY, CandidateState

FILE = "search.json"
SCHEMA_VERSION = 1
POINT = 0.01


def outcome_json(
    result: SearchResult, request: Mapping[str, Any], left_out: Mapping[str, str], rate: tuple[float, float] | None
) -> dict[str, Any]:
    """Describe a search as JSON data.

    Args:
        request: the search's settings: model, target, floor, objective, ...
        left_out: choices that the model or the target does not support -> reason.
        rate: requests per second of the original and of the winner, or None.
    """
    measured = request["gains"] == "measured"
    rows = [
        row(state, state is result.winner, measured and not state.measured) for state in result.halving.states.values()
    ]
    mark(rows)
    rows.sort(key=lambda state: (not state["winner"], not state["front"], -state["gain"]))
    return {
        "schema_version": SCHEMA_VERSION,
        **request,
        "winner": result.winner.candidate.plain() if result.winner else None,
        "nearest": None if result.winner else nearest(list(result.halving.states.values())),
        "original": {"name": AS_IT_IS, "accuracy": result.accuracy},
        "questions": {
            "search": result.halving.rules.questions,
            "asked": result.halving.questions_asked,
            "full_grid": result.grid,
        },
        "seconds": round(result.seconds, 1),
        "ended_by_budget": result.late,
        "rate": rate,
        "one_more_point": next_floor(result),
        "candidates": rows,
        "left_out": dict(left_out),
    }


def row(state: CandidateState, winner: bool = False, rough: bool = False) -> dict[str, Any]:
    """A candidate as data; differences are shares, negative for a loss. `rough`: modelled while others were measured."""
    evidence = state.trial.evidence if state.trial else None
    low, high = evidence.mean.limits(0.95) if evidence else (None, None)
    return {
        **state.candidate.plain(),
        "gain": round(state.gain, 4),
        "rough": rough,
        "questions": state.questions,
        "difference": round(evidence.mean.mean, 5) if evidence else None,
        "low": low,
        "high": high,
        "divergence": evidence.divergence if evidence else None,
        "believed": None if state.posterior is None else round(state.posterior.mean, 5),
        "chance": round(state.chance, 4),
        "winner": winner,
        "front": False,
        "why": state.out,
    }


def mark(rows: Sequence[dict[str, Any]]) -> None:
    """Mark the Pareto front of the candidates that were asked: nothing gains as much and is believed to lose less."""
    # By falling gain, a candidate is on the front if none before it, which gains as much, is believed to lose less.
    best = float("-inf")
    for candidate in sorted((r for r in rows if r["questions"]), key=lambda r: (-r["gain"], -r["believed"])):
        candidate["front"] = candidate["believed"] > best
        best = max(best, candidate["believed"])


def nearest(standings: Sequence[CandidateState]) -> dict[str, Any] | None:
    """The candidate that gains something and is believed to lose least; None where none was asked."""
    tried = [state for state in standings if state.questions and state.gain > 1 and state.posterior]
    best = max(tried, key=lambda state: state.posterior.mean if state.posterior else 0.0, default=None)
    return row(best) if best else None


def next_floor(result: SearchResult) -> dict[str, Any] | None:
    """The candidate that a floor one point lower would choose, as far as is known; None where it is the winner again."""
    margin = result.halving.rules.margin + POINT
    best, most = None, 0.0
    for state in result.halving.states.values():
        if not state.questions or state.posterior is None or state.gain <= 1 or state.trial is None:
            continue
        chance = result.halving.chance(state.posterior, state.trial.evidence, margin)
        value = expected_gain(state.gain, chance)
        if chance >= LIKELY and value > most:
            best, most = state, value
    if best is None or best is result.winner:
        return None
    return {
        "max_drop": round(margin, 6),
        "name": best.candidate.name,
        "gain": round(best.gain, 4),
        "questions": best.questions,
    }

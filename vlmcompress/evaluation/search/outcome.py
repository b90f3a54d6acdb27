"""The candidates of a search as data: the winner, and why each other one lost."""

from __future__ import annotations

import math
from typing import Any

from vlmcompress.evaluation.search.racing import CandidateState, Race

FILE = "search.json"
SCHEMA_VERSION = 4


def candidates(race: Race, winner: CandidateState | None, *, measured: bool) -> dict[str, Any]:
    """Describe the candidates of a finished search as JSON data, the winner and those that were asked first.

    Args:
        measured: whether gains were measured, so that those of candidates which were no finalists are `rough`.
    """
    states = list(race.states.values())
    rows = [row(state, state is winner, measured and not state.measured) for state in states]
    rows.sort(key=lambda candidate: (not candidate["winner"], not candidate["questions"], -candidate["gain"]))
    # Without a winner the nearest is what gains something and is estimated to lose least.
    tried = [state for state in states if state.questions and state.gain > 1 and state.estimate]
    nearest = max(tried, key=lambda state: state.estimate.mean if state.estimate else 0.0, default=None)
    full_grid = (math.prod(1 + len(factor.choices) for factor in race.factors) - 1) * race.questions
    return {
        "winner": winner.candidate.plain() if winner else None,
        "nearest": None if winner or nearest is None else row(nearest),
        "questions": {"search": race.questions, "asked": race.questions_asked, "full_grid": full_grid},
        "candidates": rows,
    }


def row(state: CandidateState, winner: bool = False, rough: bool = False) -> dict[str, Any]:
    """A candidate as data; differences are shares, negative for a loss. `rough`: modelled while others were measured."""
    difference = state.trial.difference if state.trial else None
    low, high = difference.limits(0.95) if difference else (None, None)
    return {
        **state.candidate.plain(),
        "gain": round(state.gain, 4),
        "rough": rough,
        "questions": state.questions,
        "difference": round(difference.mean, 5) if difference else None,
        "low": low,
        "high": high,
        "divergence": state.trial.divergence if state.trial else None,
        "chance": round(state.chance, 4),
        "winner": winner,
        "why": state.out,
    }

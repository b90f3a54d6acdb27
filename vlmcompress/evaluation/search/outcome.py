"""The candidates of a search as data: the winner, why each other one lost, the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vlmcompress.evaluation.search.successive_halving import CandidateState, SuccessiveHalving

FILE = "search.json"
SCHEMA_VERSION = 2


def candidates(halving: SuccessiveHalving, winner: CandidateState | None, *, measured: bool) -> dict[str, Any]:
    """Describe the candidates of a finished search as JSON data, the winner and the Pareto front first.

    Args:
        measured: whether gains were measured, so that those of candidates which were no finalists are `rough`.
    """
    states = list(halving.states.values())
    rows = [row(state, state is winner, measured and not state.measured) for state in states]
    mark(rows)
    rows.sort(key=lambda candidate: (not candidate["winner"], not candidate["front"], -candidate["gain"]))
    # Without a winner the nearest is what gains something and is believed to lose least.
    tried = [state for state in states if state.questions and state.gain > 1 and state.posterior]
    nearest = max(tried, key=lambda state: state.posterior.mean if state.posterior else 0.0, default=None)
    full_grid = (math.prod(1 + len(factor.choices) for factor in halving.factors) - 1) * halving.rules.questions
    return {
        "winner": winner.candidate.plain() if winner else None,
        "nearest": None if winner or nearest is None else row(nearest),
        "questions": {
            "search": halving.rules.questions,
            "asked": halving.questions_asked,
            "full_grid": full_grid,
        },
        "candidates": rows,
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

"""What a search found, as data: the winner, every candidate and why it lost, the Pareto front, what one more point buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmcompress.evaluation.search.candidate import AS_IT_IS
from vlmcompress.evaluation.search.live_trials import SearchResult
from vlmcompress.evaluation.search.posterior import worth
from vlmcompress.evaluation.search.successive_halving import LIKELY, Standing

FILE = "search.json"
SCHEMA_VERSION = 1
POINT = 0.01


def plain(
    result: SearchResult, request: Mapping[str, Any], left_out: Mapping[str, str], rate: tuple[float, float] | None
) -> dict[str, Any]:
    """Describe a search as JSON data.

    Args:
        asked: what the search was asked for: model, target, floor, objective, ...
        left_out: choices that the model or the target does not take -> why.
        rate: requests a second of the original and of the winner, if they are known.
    """
    measured = request["gains"] == "measured"
    rows = [
        row(standing, standing is result.winner, measured and not standing.measured)
        for standing in result.halving.standings.values()
    ]
    mark(rows)
    rows.sort(key=lambda standing: (not standing["winner"], not standing["front"], -standing["gain"]))
    return {
        "schema_version": SCHEMA_VERSION,
        **request,
        "winner": result.winner.candidate.plain() if result.winner else None,
        "nearest": None if result.winner else nearest(list(result.halving.standings.values())),
        "original": {"name": AS_IT_IS, "accuracy": result.accuracy},
        "questions": {
            "search": result.halving.rules.questions,
            "asked": result.halving.questions_asked,
            "full_grid": result.grid,
        },
        "seconds": round(result.seconds, 1),
        "ended_by_budget": result.late,
        "rate": rate,
        "one_more_point": one_more_point(result),
        "candidates": rows,
        "left_out": dict(left_out),
    }


def row(standing: Standing, winner: bool = False, rough: bool = False) -> dict[str, Any]:
    """Describe a candidate; differences are shares, negative for a loss. `rough`: modelled where others were measured."""
    evidence = standing.trial.evidence if standing.trial else None
    low, high = evidence.mean.limits(0.95) if evidence else (None, None)
    return {
        **standing.candidate.plain(),
        "gain": round(standing.gain, 4),
        "rough": rough,
        "questions": standing.questions,
        "difference": round(evidence.mean.mean, 5) if evidence else None,
        "low": low,
        "high": high,
        "divergence": evidence.divergence if evidence else None,
        "believed": None if standing.posterior is None else round(standing.posterior.mean, 5),
        "chance": round(standing.chance, 4),
        "winner": winner,
        "front": False,
        "why": standing.out,
    }


def mark(rows: Sequence[dict[str, Any]]) -> None:
    """Mark the Pareto front of the candidates that were asked: nothing gains as much and is believed to lose less."""
    # By falling gain, a candidate is on the front if none before it, which gains as much, is believed to lose less.
    best = float("-inf")
    for candidate in sorted((r for r in rows if r["questions"]), key=lambda r: (-r["gain"], -r["believed"])):
        candidate["front"] = candidate["believed"] > best
        best = max(best, candidate["believed"])


def nearest(standings: Sequence[Standing]) -> dict[str, Any] | None:
    """The candidate that gains something and is believed to lose least; None where none was asked."""
    tried = [standing for standing in standings if standing.questions and standing.gain > 1 and standing.posterior]
    best = max(tried, key=lambda standing: standing.posterior.mean if standing.posterior else 0.0, default=None)
    return row(best) if best else None


def one_more_point(result: SearchResult) -> dict[str, Any] | None:
    """The candidate that a floor one point lower would choose, as far as is known; None where it is the winner again."""
    margin = result.halving.rules.margin + POINT
    best, most = None, 0.0
    for standing in result.halving.standings.values():
        if not standing.questions or standing.posterior is None or standing.gain <= 1 or standing.trial is None:
            continue
        chance = result.halving.chance(standing.posterior, standing.trial.evidence, margin)
        value = worth(standing.gain, chance)
        if chance >= LIKELY and value > most:
            best, most = standing, value
    if best is None or best is result.winner:
        return None
    return {
        "max_drop": round(margin, 6),
        "name": best.candidate.name,
        "gain": round(best.gain, 4),
        "questions": best.questions,
    }

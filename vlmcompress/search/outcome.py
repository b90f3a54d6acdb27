"""What a search found, as data: the winner, every candidate and why it lost, the Pareto front, what one more point buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmcompress.search.belief import worth
from vlmcompress.search.candidate import AS_IT_IS
from vlmcompress.search.race import LIKELY, Standing
from vlmcompress.search.run import Found

FILE = "search.json"
SCHEMA_VERSION = 1
POINT = 0.01


def plain(
    found: Found, asked: Mapping[str, Any], left_out: Mapping[str, str], rate: tuple[float, float] | None
) -> dict[str, Any]:
    """Describe a search as JSON data.

    Args:
        asked: what the search was asked for: model, target, floor, objective, ...
        left_out: choices that the model or the target does not take -> why.
        rate: requests a second of the original and of the winner, if they are known.
    """
    measured = asked["gains"] == "measured"
    rows = [row(one, one is found.winner, measured and not one.measured) for one in found.race.standings.values()]
    mark(rows)
    rows.sort(key=lambda one: (not one["winner"], not one["front"], -one["gain"]))
    return {
        "schema_version": SCHEMA_VERSION,
        **asked,
        "winner": found.winner.candidate.plain() if found.winner else None,
        "nearest": None if found.winner else nearest(list(found.race.standings.values())),
        "original": {"name": AS_IT_IS, "accuracy": found.accuracy},
        "questions": {"search": found.race.rules.questions, "asked": found.race.asked, "full_grid": found.grid},
        "seconds": round(found.seconds, 1),
        "ended_by_budget": found.late,
        "rate": rate,
        "one_more_point": one_more_point(found),
        "candidates": rows,
        "left_out": dict(left_out),
    }


def row(one: Standing, winner: bool = False, rough: bool = False) -> dict[str, Any]:
    """Describe a candidate; differences are shares, negative for a loss. `rough`: modelled where others were measured."""
    evidence = one.trial.evidence if one.trial else None
    low, high = evidence.mean.limits(0.95) if evidence else (None, None)
    return {
        **one.candidate.plain(),
        "gain": round(one.gain, 4),
        "rough": rough,
        "questions": one.questions,
        "difference": round(evidence.mean.mean, 5) if evidence else None,
        "low": low,
        "high": high,
        "divergence": evidence.divergence if evidence else None,
        "believed": None if one.belief is None else round(one.belief.mean, 5),
        "chance": round(one.chance, 4),
        "winner": winner,
        "front": False,
        "why": one.out,
    }


def mark(rows: Sequence[dict[str, Any]]) -> None:
    """Mark the Pareto front of the candidates that were asked: nothing gains as much and is believed to lose less."""
    best = float("-inf")
    for one in sorted((r for r in rows if r["questions"]), key=lambda r: (-r["gain"], -r["believed"])):
        one["front"] = one["believed"] > best
        best = max(best, one["believed"])


def nearest(standings: Sequence[Standing]) -> dict[str, Any] | None:
    """The candidate that gains something and is believed to lose least; None where none was asked."""
    tried = [one for one in standings if one.questions and one.gain > 1 and one.belief]
    best = max(tried, key=lambda one: one.belief.mean if one.belief else 0.0, default=None)
    return row(best) if best else None


def one_more_point(found: Found) -> dict[str, Any] | None:
    """The candidate that a floor one point lower would choose, as far as is known; None where it is the winner again."""
    margin = found.race.rules.margin + POINT
    best, most = None, 0.0
    for one in found.race.standings.values():
        if not one.questions or one.belief is None or one.gain <= 1 or one.trial is None:
            continue
        chance = found.race.chance(one.belief, one.trial.evidence, margin)
        value = worth(one.gain, chance)
        if chance >= LIKELY and value > most:
            best, most = one, value
    if best is None or best is found.winner:
        return None
    return {
        "max_drop": round(margin, 6),
        "name": best.candidate.name,
        "gain": round(best.gain, 4),
        "questions": best.questions,
    }

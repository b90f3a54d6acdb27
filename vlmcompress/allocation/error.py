"""Least predicted error within the budget: a multiple-choice knapsack, solved exactly.

    minimize sum_i e_i(k_i)    subject to    sum_i b_i(k_i) <= B,    one candidate k_i for each group i

A price `lambda` on bytes splits the problem: `L(lambda) = sum_i min_k (e_i + lambda b_i) - lambda B` is at most the optimum
for any lambda >= 0, and the lambda that makes it largest comes out of walking the groups' lower convex hulls from the smallest
candidates upwards, steepest fall of error first. That walk, filled up greedily, is also a good first choice. Between the two
lies what can still be gained, and dynamic programming over (bytes, error) settles it: a partial choice is dropped when another
has no more bytes and no more error, or when its price bound reaches the best choice known. What survives is little, as the two
bounds are close: 320 groups of 5 candidates take under a second. Only when more than `LIMIT` partial choices survive are those
with the worst bounds dropped; the result is then within `gap` of the optimum, which `solve` returns (0 otherwise).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmcompress.allocation import Candidate, Candidates, Key, check, cost

NEEDS: frozenset[str] = frozenset()
LIMIT = 20_000  # partial choices kept after each group

Partial = tuple[int, float, Any]  # bytes, error, (the partial choice before, index of the last candidate)


def decide(candidates: Candidates, budget: int, facts: Mapping[str, Any]) -> dict[Key, int]:
    """Choose the candidates of least summed error within `budget` bytes. Raises `Unreachable`."""
    return solve(candidates, budget)[0]


def solve(candidates: Candidates, budget: int, limit: int = LIMIT) -> tuple[dict[Key, int], float]:
    """Choose the candidates of least summed error, and bound how far the sum can be from the optimum (0: it is the optimum)."""
    check(candidates, budget)
    keys = sorted(candidates)
    groups = [candidates[key] for key in keys]
    price, best = _greedy(groups, budget)
    least = cost(candidates, dict(zip(keys, best, strict=True))).error
    rest = [0.0]  # rest[-1 - i]: the least priced cost of the groups from i on
    for group in reversed(groups):
        rest.append(rest[-1] + min(one.error + price * one.nbytes for one in group))
    bound = rest[-1] - price * budget
    room = budget - sum(min(one.nbytes for one in group) for group in groups)
    states: list[Partial] = [(0, 0.0, None)]
    exact = True
    for i, group in enumerate(groups):
        after = rest[len(groups) - 1 - i] - price * budget
        room += min(one.nbytes for one in group)  # room that the later groups leave at their smallest
        grown = [
            (size + one.nbytes, error + one.error, (past, k))
            for size, error, past in states
            for k, one in enumerate(group)
            if size + one.nbytes <= room and error + one.error + price * (size + one.nbytes) + after < least
        ]
        states = _undominated(grown)
        if len(states) > limit:
            exact = False
            states.sort(key=lambda state: state[1] + price * state[0])
            states = states[:limit]
    _, error, past = min(states, key=lambda state: state[1], default=(0, least, None))
    if error < least:
        least, best = error, _unwind(past)
    gap = 0.0 if exact else max(0.0, least - bound)
    return dict(zip(keys, best, strict=True)), gap


def _greedy(groups: Sequence[Sequence[Candidate]], budget: int) -> tuple[float, list[int]]:
    """Find the best price of a byte, and a choice within the budget that is near the optimum."""
    hulls = [_hull(group) for group in groups]
    choice = [hull[0] for hull in hulls]
    room = budget - sum(group[k].nbytes for group, k in zip(groups, choice, strict=True))
    steps = []
    for i, hull in enumerate(hulls):
        for a, b in zip(hull[:-1], hull[1:], strict=True):
            low, high = groups[i][a], groups[i][b]
            slope = (low.error - high.error) / (high.nbytes - low.nbytes)
            steps.append((-slope, i, b))
    price: float | None = None
    closed: set[int] = set()
    for falling, i, b in sorted(steps):
        extra = groups[i][b].nbytes - groups[i][choice[i]].nbytes
        if i not in closed and extra <= room:
            choice[i], room = (b, room - extra) if extra > 0 else (choice[i], room)
        else:  # later steps of this hull would skip one; smaller steps of others may still fit
            closed.add(i)
            price = -falling if price is None else price
    return price or 0.0, choice


def _hull(group: Sequence[Candidate]) -> list[int]:
    """Select the candidates on the lower convex hull of (bytes, error), by rising bytes and falling error."""
    hull: list[int] = []
    for k in sorted(range(len(group)), key=lambda k: (group[k].nbytes, group[k].error)):
        new = group[k]
        if hull and new.error >= group[hull[-1]].error:
            continue
        while len(hull) > 1:
            a, b = group[hull[-2]], group[hull[-1]]
            if (a.error - b.error) * (new.nbytes - b.nbytes) > (b.error - new.error) * (b.nbytes - a.nbytes):
                break
            hull.pop()
        hull.append(k)
    return hull


def _undominated(states: list[Partial]) -> list[Partial]:
    states.sort(key=lambda state: state[:2])
    kept: list[Partial] = []
    for state in states:
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


def _unwind(past: Any) -> list[int]:
    found = []
    while past is not None:
        past, k = past
        found.append(k)
    return found[::-1]

"""Rules that allocate a budget of bytes to the groups of a decoder; `RULES` has them by their names in `bits.by`.

Pure functions: from tables of sizes and predicted errors to one choice per group. A *group* is the linear layers that read
one input (and that engines fuse: q/k/v, gate/up), so that shards of a fused matrix always get the same choice; all experts of
a block are one group, too, as engines run them by one kernel.

`error` is the default: the least predicted error within the budget, a multiple-choice knapsack, solved exactly.

    minimize sum_i e_i(k_i)    subject to    sum_i b_i(k_i) <= B,    one candidate k_i for each group i

A price `lambda` on bytes splits the problem: `L(lambda) = sum_i min_k (e_i + lambda b_i) - lambda B` is at most the optimum
for any lambda >= 0, and the lambda that makes it largest comes out of walking the groups' lower convex hulls from the
smallest candidates upwards, steepest fall of error first. That walk, completed greedily, also gives a good first choice. The
gap between the lower bound and that choice is closed by dynamic programming over (bytes, error): a partial choice is dropped
when another has no more bytes and no more error, or when its price bound reaches the best choice so far. Few survive, as
the two bounds are close: 320 groups of 5 candidates take under a second. Only when more than `LIMIT` partial
choices survive are those with the worst bounds dropped; the result is then within `gap` of the optimum, which
`solve_knapsack` returns (0 otherwise).

`luq` (LUQ, arXiv 2509.23729) uses the entropy of activations and no error: the blocks whose input has the least entropy get
the fewest bits. Entropy is that of the clusters (k-means, K = 100) that a block's normalized input vectors fall into. The
paper gives the lowest blocks about 1 bit (BiLLM, which no engine runs) and the others 4; here the widths are the largest that
fits for all blocks and the next larger one, for as many blocks as the budget allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIMIT = 20_000  # partial choices kept after each group

Key = tuple[int, str]
"""A group: number of the decoder block and name within it."""


@dataclass(frozen=True)
class GroupOption:
    """One way to store a group: `nbytes` on disk, and the predicted `error`, which adds up over groups."""

    nbytes: int
    error: float


Candidates = Mapping[Key, Sequence[GroupOption]]
Partial = tuple[int, float, Any]  # bytes, error, (the partial choice before, index of the last candidate)


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        reads_entropy: whether it reads the entropy of the blocks' inputs.
        decide: from candidates, a budget in bytes and the entropy of each block's input in bits (empty: not measured), the
            index of each group's candidate. Raises `Unreachable` for a budget that cannot be met, and ValueError for
            a lacking entropy or candidate.
    """

    reads_entropy: bool
    decide: Callable[[Candidates, int, Sequence[float | None]], dict[Key, int]]


class Unreachable(ValueError):
    """The budget is below the sum of the smallest candidates: `smallest` bytes."""

    def __init__(self, budget: int, smallest: int):
        super().__init__(f"the budget is {budget} bytes, but the smallest possible size is {smallest}")
        self.smallest = smallest


def _require_reachable(candidates: Candidates, budget: int) -> None:
    """Raise `Unreachable` for a budget that cannot be met, and ValueError for a group without a candidate."""
    if empty := [key for key, choices in candidates.items() if not choices]:
        raise ValueError(f"group {empty[0]} has no candidate")
    smallest = sum(min(candidate.nbytes for candidate in choices) for choices in candidates.values())
    if smallest > budget:
        raise Unreachable(budget, smallest)


def cost(candidates: Candidates, choice: Mapping[Key, int]) -> GroupOption:
    """Sum the bytes and the errors of a choice."""
    chosen = [candidates[key][index] for key, index in choice.items()]
    return GroupOption(sum(candidate.nbytes for candidate in chosen), sum(candidate.error for candidate in chosen))


def solve_knapsack(candidates: Candidates, budget: int, limit: int = LIMIT) -> tuple[dict[Key, int], float]:
    """Return the choice of candidates with the least summed error, and a bound on its gap to the optimum (0: it is optimal)."""
    _require_reachable(candidates, budget)
    keys = sorted(candidates)
    groups = [candidates[key] for key in keys]
    price, best = _greedy(groups, budget)
    least = cost(candidates, dict(zip(keys, best, strict=True))).error
    rest = [0.0]  # rest[-1 - i]: the least priced cost of the groups from i on
    for group in reversed(groups):
        rest.append(rest[-1] + min(candidate.error + price * candidate.nbytes for candidate in group))
    bound = rest[-1] - price * budget  # L(lambda), at most the optimum
    room = budget - sum(min(candidate.nbytes for candidate in group) for group in groups)
    states: list[Partial] = [(0, 0.0, None)]
    exact = True
    for i, group in enumerate(groups):
        after = rest[len(groups) - 1 - i] - price * budget
        room += min(candidate.nbytes for candidate in group)  # room that the later groups leave at their smallest
        # Error so far, the price of the bytes so far and the least cost of the later groups bound every completion of a partial
        # choice from below, as in L(lambda). Only partial choices whose bound is below the best choice are kept.
        grown: list[Partial] = [
            (size + candidate.nbytes, error + candidate.error, (past, k))
            for size, error, past in states
            for k, candidate in enumerate(group)
            if size + candidate.nbytes <= room
            and error + candidate.error + price * (size + candidate.nbytes) + after < least
        ]
        # A partial choice with no fewer bytes and no less error than another one cannot lead to a better result.
        grown.sort(key=lambda state: state[:2])
        states = []
        for state in grown:
            if not states or state[1] < states[-1][1]:
                states.append(state)
        if len(states) > limit:
            exact = False
            states.sort(key=lambda state: state[1] + price * state[0])
            states = states[:limit]
    _, error, past = min(states, key=lambda state: state[1], default=(0, least, None))
    if error < least:
        least, best = error, []
        while past is not None:  # from the last group back
            past, k = past
            best.insert(0, k)
    gap = 0.0 if exact else max(0.0, least - bound)
    return dict(zip(keys, best, strict=True)), gap


def _greedy(groups: Sequence[Sequence[GroupOption]], budget: int) -> tuple[float, list[int]]:
    """Return the best price of a byte, and a choice within the budget that is near the optimum."""
    hulls = [_hull(group) for group in groups]
    choice = [hull[0] for hull in hulls]
    room = budget - sum(group[k].nbytes for group, k in zip(groups, choice, strict=True))
    steps = []
    for i, hull in enumerate(hulls):
        for a, b in zip(hull[:-1], hull[1:], strict=True):  # on a hull the error falls less and less for each byte
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


def _hull(group: Sequence[GroupOption]) -> list[int]:
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


def _by_entropy(candidates: Candidates, budget: int, entropy: Sequence[float | None]) -> dict[Key, int]:
    """Give blocks of the lowest entropy the smallest candidate, and as many others as fit a larger one.

    The larger one is the smallest size that does not fit everywhere (the largest, if all fit): with a budget between 3 and 4
    bits that is 2 and 4 bits, as in LUQ. To use the rest of the budget, the first block that cannot get the larger size as a
    whole gets the largest that fits, group by group, followed by the blocks before it.
    """
    layers = sorted({layer for layer, _ in candidates})
    if lacking := [layer for layer in layers if layer >= len(entropy) or entropy[layer] is None]:
        raise ValueError(f"block {lacking[0]} has no entropy")
    order = sorted(layers, key=lambda layer: (entropy[layer], layer))  # least entropy first: those get the fewest bits
    _require_reachable(candidates, budget)
    sizes = {
        key: sorted(range(len(choices)), key=lambda k: (choices[k].nbytes, choices[k].error))
        for key, choices in candidates.items()
    }
    ranks = max(map(len, sizes.values()))

    def at(key: Key, rank: int) -> int:
        return sizes[key][min(rank, len(sizes[key]) - 1)]

    def total(rank: int) -> int:
        return sum(choices[at(key, rank)].nbytes for key, choices in candidates.items())

    high = next((rank for rank in range(ranks) if total(rank) > budget), ranks - 1)
    choice = {key: at(key, 0) for key in candidates}
    room = budget - total(0)
    place = {layer: rank for rank, layer in enumerate(order)}
    for key in sorted(candidates, key=lambda key: (-place[key[0]], key[1])):
        choices = candidates[key]
        for rank in range(high, 0, -1):
            extra = choices[at(key, rank)].nbytes - choices[choice[key]].nbytes
            if extra <= room:
                choice[key], room = at(key, rank), room - extra
                break
    return choice


RULES: Mapping[str, Rule] = {
    "error": Rule(False, lambda candidates, budget, _entropy: solve_knapsack(candidates, budget)[0]),
    "luq": Rule(True, _by_entropy),
}

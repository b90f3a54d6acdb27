"""Rules that share out a budget of bytes among the groups of a decoder, one a file; its name is `bits.by` of a recipe.

Pure: tables of sizes and predicted errors in, one choice a group out. A *group* is linear layers that read one input (and that
engines fuse: q/k/v, gate/up), so shards of a fused matrix always get the same choice; all experts of a block are one group,
too, as engines run them by one kernel. A module of this folder has

    NEEDS: frozenset[str]                                    facts that it reads, e.g. {"entropy"}; empty: only errors
    decide(candidates, budget, facts) -> {key: index}        which candidate each group gets

To add a rule, add a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Key = tuple[int, str]
"""A group: number of the decoder block and name within it."""


@dataclass(frozen=True)
class Candidate:
    """One way to store a group: `nbytes` on disk, and the predicted `error`, which adds up over groups."""

    nbytes: int
    error: float


Candidates = Mapping[Key, Sequence[Candidate]]


class Rule(Protocol):
    """The protocol of every module of the folder; the module itself is the object."""

    NEEDS: frozenset[str]

    def decide(self, candidates: Candidates, budget: int, facts: Mapping[str, Any]) -> dict[Key, int]: ...


class Unreachable(ValueError):
    """The budget is below what the smallest candidates need together: `smallest` bytes."""

    def __init__(self, budget: int, smallest: int):
        super().__init__(f"{budget} bytes are asked for and {smallest} are the fewest possible")
        self.smallest = smallest


def check(candidates: Candidates, budget: int) -> None:
    """Raise `Unreachable` for a budget that cannot be met, and ValueError for a group without a candidate."""
    if empty := [key for key, own in candidates.items() if not own]:
        raise ValueError(f"group {empty[0]} has no candidate")
    smallest = sum(min(one.nbytes for one in own) for own in candidates.values())
    if smallest > budget:
        raise Unreachable(budget, smallest)


def cost(candidates: Candidates, choice: Mapping[Key, int]) -> Candidate:
    """Sum the bytes and the errors of a choice."""
    chosen = [candidates[key][index] for key, index in choice.items()]
    return Candidate(sum(one.nbytes for one in chosen), sum(one.error for one in chosen))

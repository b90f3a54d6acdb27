"""The order in which the two sides run: baseline, candidate, candidate, baseline, baseline, candidate, ...

A machine drifts (it warms up, a neighbour comes and goes). With A B B A a drift that is linear in time adds the same to
both sides over two repeats, while A B A B favours one of them. Neighbours of a pair ran right after one another, so
their ratio is of one time; neighbouring turns of one side need no restart of its engine between them.
"""

from __future__ import annotations

from typing import Literal

SideName = Literal["baseline", "candidate"]
Turn = tuple[SideName, int]


def abba(repeats: int) -> list[Turn]:
    """List `(side, repeat)` in the order of the runs; each repeat has both sides, next to one another."""
    sides: tuple[SideName, SideName] = ("baseline", "candidate")
    return [(side, repeat) for repeat in range(repeats) for side in (sides if repeat % 2 == 0 else sides[::-1])]

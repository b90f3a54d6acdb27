"""Who does a list of jobs: this process, one after the other, or the workers of a Ray cluster, several at once.

    with closing(crew.of("auto")) as workers:
        for index, found in workers.map(function, jobs):
            ...

A job is a function of one argument; with Ray both go to another process, maybe on another machine, so they have to be
picklable, and nothing but the result comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from vlmcompress.common._jobs import Failed, J, R, attempt

__all__ = ["Crew", "Failed", "InTurn", "of"]


class Crew(Protocol):
    """A crew: it does jobs. `name` is for people, `size` is the number of jobs that it does at once."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Generator[tuple[int, R | Failed]]:
        """Do the jobs, and yield (index of the job, result) as they finish. Closing the generator cancels what is open.

        A job that raises `UserError`, or whose worker is lost again and again, gives a `Failed`. Any other exception of a
        job is raised here.
        """
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...


@dataclass(frozen=True)
class InTurn:
    """A crew of this process alone, which starts a job when its result is asked for."""

    name: str = "in turn"
    size: int = 1

    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Generator[tuple[int, R | Failed]]:
        """Do the jobs one after the other; see `Crew`."""
        for index in range(len(jobs)):
            yield index, attempt(function, jobs[index])

    def close(self) -> None:
        """Do nothing: there is nobody else."""


def of(address: str | None) -> Crew:
    """The crew at an address.

    Args:
        address: None: this process alone. Else Ray's: `auto` (the cluster that this machine is a node of), `HOST:PORT` of a
            cluster's head, or `local`, which starts one on this machine until `close`.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
    """
    if address is None:
        return InTurn()
    from vlmcompress.common._ray import OnRay

    return OnRay(address)

"""What one job of a crew comes to: its result, or the line of its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vlmcompress.errors import UserError

J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True)
class Failed:
    """What stands in place of a job's result: the line of the `UserError` that it raised, or how its workers were lost."""

    reason: str


def attempt(function: Callable[[J], R], job: J) -> R | Failed:
    """Do a job; a `UserError` becomes a `Failed`."""
    try:
        return function(job)
    except UserError as error:
        return Failed(str(error))

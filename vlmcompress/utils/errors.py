"""Errors that a user can act on. The CLI prints them as one line and exits with 2; any other exception is a bug."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """Input that the user has to correct. The message is one line: what is wrong, where, and what to do."""


class BadSample(UserError):
    """A sample that cannot be used; the message says why. Other samples of the data may be usable."""


class GateError(Exception):
    """A quality gate was not met (exit code 1)."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest choice, or `; choose from a, b, c` when none is close."""
    choices = sorted(choices)
    if close := closest(name, choices):
        return f"; did you mean '{close}'?"
    return f"; choose from {', '.join(choices)}" if choices else ""


def closest(name: str, choices: Iterable[str], cutoff: float = 0.62) -> str | None:
    """The most likely intended choice: a prefix of `name` (a100-80gb: a100) or a similar spelling; None: none is close."""
    alike = [choice for choice in choices if _numbers_agree(name, choice)]
    if begun := [choice for choice in alike if name.startswith(f"{choice}-")]:
        return max(begun, key=len)
    return next(iter(difflib.get_close_matches(name, alike, n=1, cutoff=cutoff)), None)


def _numbers_agree(name: str, choice: str) -> bool:
    """Whether each number in `choice` may be one of `name` with digits omitted or doubled: int4 is not a typo of int8."""
    numbers = re.findall(r"\d+", name)

    def within(part: str, whole: str) -> bool:
        digits = iter(whole)
        return all(digit in digits for digit in part)

    return all(any(within(n, m) or within(m, n) for m in numbers) for n in re.findall(r"\d+", choice))

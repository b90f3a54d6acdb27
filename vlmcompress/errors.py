"""Errors that a user can act on. The CLI prints them as one line and exits with 2; anything else is a defect of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Input that the user has to mend. The message is one line: what was wrong, where, and what to do."""


class GateError(Exception):
    """A quality gate was not met (exit code 1)."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest choice, or `; choose from a, b, c` when none is close."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; choose from {', '.join(choices)}" if choices else ""

"""Lines for people, said while a run goes on."""

from __future__ import annotations

import sys


def note(line: str) -> None:
    """Say on stderr what is not wrong but good to know."""
    print(f"note: {line}", file=sys.stderr, flush=True)

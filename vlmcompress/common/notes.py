"""Lines for people, said while a run goes on."""

from __future__ import annotations

import sys


def note(line: str) -> None:
    """Print on stderr a line that is no error but good to know."""
    print(f"note: {line}", file=sys.stderr, flush=True)

"""Lines for people, said while a run goes on."""

from __future__ import annotations

import sys

from vlmcompress.common import team


def note(line: str) -> None:
    """Print on stderr a line that is no error but good to know."""
    if team.first():
        print(f"note: {line}", file=sys.stderr, flush=True)

"""What a verb returns, and the exit codes of the command line."""

from __future__ import annotations

from typing import Any

Outcome = tuple[int, Any, str]
"""Exit code, data for `--json`, text for people."""

OK, GATE, BAD_INPUT, INTERNAL, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 4, 130

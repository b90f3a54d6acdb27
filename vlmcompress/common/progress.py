"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (label, done, total)."""


def silent(_label: str, _done: int, _total: int) -> None:
    """No progress shown."""

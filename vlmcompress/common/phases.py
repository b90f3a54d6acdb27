"""Where the time of a run goes: seconds by phase.

    with phases.measured() as seconds:      # seconds fills while the run goes on
        with phases.phase("observing"):
            ...

A phase within a phase counts as its own and not as the outer one's. Outside `measured` a phase measures nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)
_within: ContextVar[list[float] | None] = ContextVar("within", default=None)  # seconds of phases within the present one


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Measure the phases in the context: name -> seconds, in the order in which they first ended."""
    found = _seconds.get()
    if found is not None:
        yield found  # a run within a run
        return
    token = _seconds.set(found := {})
    try:
        yield found
    finally:
        _seconds.reset(token)


def so_far() -> dict[str, float]:
    """Seconds of each phase that has ended, to the millisecond, the longest first."""
    found = _seconds.get() or {}
    return {name: round(found[name], 3) for name in sorted(found, key=lambda name: -found[name])}


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time in the context as of phase `name`."""
    found, outer = _seconds.get(), _within.get()
    if found is None:
        yield
        return
    began, inner = time.perf_counter(), [0.0]
    token = _within.set(inner)
    try:
        yield
    finally:
        _within.reset(token)
        passed = time.perf_counter() - began
        found[name] = found.get(name, 0.0) + passed - inner[0]
        if outer is not None:
            outer[0] += passed

"""Progress of long work: the callback that receives it, a bar on stderr, and where the time goes, in seconds by phase.

    with timed_phases() as seconds:      # seconds fills while the run goes on
        with phase("observing"):
            ...

A phase within a phase counts as its own and not as the outer one's. Outside `timed_phases` a phase measures nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vlmcompress.common import distributed
from vlmcompress.common.text import duration

Progress = Callable[[str, int, int], None]
"""A callback for progress, called with (label, done, total)."""


def silent(_label: str, _done: int, _total: int) -> None:
    """A progress callback that shows nothing."""


class ProgressBar:
    """A bar with the time left on stderr; where that is no terminal, a line every half minute instead.

    Call it with (label, done, total). The rate is counted from the second report of a label on that says something new: until
    the first step is done much is made ready, and what a resumed run had done took no time.

    Args:
        clock: gives seconds, counted from anywhere.
    """

    WIDTH = 28
    PERIOD = 0.1  # seconds between two drawings
    LINES = 30.0  # seconds between two lines

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = sys.stderr.isatty()
        self._clock, self._said = clock, clock()
        self._label = ""
        self._start = self._last = 0.0
        self._done = 0  # of the latest report
        self._rated: tuple[float, int] | None = None  # when the first step was done, and what was done then

    def __call__(self, label: str, done: int, total: int) -> None:
        if total <= 0 or not distributed.is_main():
            return
        now = self._clock()
        if label != self._label:
            self.close()
            self._label, self._start, self._done, self._last = label, now, done, float("-inf")
            self._rated = None
        if done != self._done:
            self._done, self._rated = done, self._rated or (now, done)
        if not self._shown:
            self._line(now, label, done, total)
            return
        if now - self._last < self.PERIOD and done < total:
            return
        self._last = now
        filled = self.WIDTH * done // total
        bar = "#" * filled + "-" * (self.WIDTH - filled)
        sys.stderr.write(f"\r\x1b[K{label:<28.28} [{bar}] {done / total:4.0%}  {self._time_left(now, done, total)}")
        sys.stderr.flush()

    def _line(self, now: float, label: str, done: int, total: int) -> None:
        if now - self._said >= self.LINES:
            self._said = now
            time_left = self._time_left(now, done, total)
            print(f"{label}: {done / total:.0%}{f', {time_left}' if time_left else ''}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line of the current bar."""
        if self._shown and self._label:
            sys.stderr.write("\n")
            sys.stderr.flush()
        self._label = ""

    def _time_left(self, now: float, done: int, total: int) -> str:
        if done >= total:
            return f"in {duration(now - self._start)}"
        since, before = self._rated or (now, done)
        passed, steps = now - since, done - before
        return f"{duration(passed / steps * (total - done))} left" if steps > 0 and passed > 1 else ""


_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)
_within: ContextVar[list[float] | None] = ContextVar("within", default=None)  # seconds of phases within the present one


@contextmanager
def timed_phases() -> Iterator[dict[str, float]]:
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


def phase_seconds() -> dict[str, float]:
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

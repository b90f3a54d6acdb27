"""Progress of long runs: the type of progress callbacks, a bar on stderr, and seconds by phase.

    with timed_phases() as seconds:      # filled while the run goes on
        with phase("observing"):
            ...

The time of a nested phase is not counted in the outer one. Outside `timed_phases` a phase measures nothing.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vlmcompress.utils import distributed
from vlmcompress.utils.text import duration

Progress = Callable[[str, int, int], None]
"""A callback for progress, called with (label, done, total)."""

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)
# seconds of phases nested in the current one
_within: ContextVar[list[float] | None] = ContextVar("within", default=None)


def silent(_label: str, _done: int, _total: int) -> None:
    """A progress callback that shows nothing."""


class ProgressBar:
    """tqdm's bar on stderr; a line every half minute where that is not a terminal.

    Call it with (label, done, total). The rate is measured from the first completed step on, as preparation precedes that step
    and the steps of a resumed run took no time.

    Args:
        clock: returns seconds from any origin; used for the lines.
    """

    LINES = 30.0  # seconds between two lines
    FORMAT = "{desc:<28.28} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    WIDTH = 78  # columns, or all of a narrower terminal

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = sys.stderr.isatty()
        self._clock, self._last_line = clock, clock()
        self._label, self._start, self._done = "", 0.0, 0
        self._first_step: tuple[float, int] | None = None  # its time, and `done` at that time
        self._bar: Any = None

    def __call__(self, label: str, done: int, total: int) -> None:
        if total <= 0 or not distributed.is_main():
            return
        now = self._clock()
        if label != self._label:
            self.close()
            self._label, self._start, self._done, self._first_step = label, now, done, None
            if self._terminal:
                from tqdm import tqdm

                self._bar = tqdm(
                    desc=label,
                    total=total,
                    initial=done,
                    bar_format=self.FORMAT,
                    ncols=min(self.WIDTH, shutil.get_terminal_size().columns - 1),
                    smoothing=0,
                    ascii=" #",
                    disable=False,
                )
        if done != self._done and self._first_step is None:
            self._first_step = now, done
            if self._bar is not None:
                self._bar.initial, self._bar.start_t = done, self._bar._time()
        self._done = done
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif now - self._last_line >= self.LINES:
            self._last_line = now
            time_left = self._time_left(now, done, total)
            print(f"{label}: {done / total:.0%}{f', {time_left}' if time_left else ''}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line of the current bar."""
        if self._bar is not None:
            # tqdm does not end the line if nothing was drawn since the start, which the first step reset
            self._bar.start_t = min(self._bar.start_t, self._bar.last_print_t)
            self._bar.close()
        self._bar, self._label = None, ""

    def _time_left(self, now: float, done: int, total: int) -> str:
        if done >= total:
            return f"in {duration(now - self._start)}"
        since, before = self._first_step or (now, done)
        passed, steps = now - since, done - before
        return f"{duration(passed / steps * (total - done))} left" if steps > 0 and passed > 1 else ""


@contextmanager
def timed_phases() -> Iterator[dict[str, float]]:
    """Measure the phases in the context: name -> seconds, in the order in which they first ended."""
    seconds = _seconds.get()
    if seconds is not None:
        yield seconds  # nested: the outer context measures
        return
    token = _seconds.set(seconds := {})
    try:
        yield seconds
    finally:
        _seconds.reset(token)


def phase_seconds() -> dict[str, float]:
    """Seconds of each finished phase, rounded to milliseconds, the longest first."""
    seconds = _seconds.get() or {}
    return {name: round(seconds[name], 3) for name in sorted(seconds, key=lambda name: -seconds[name])}


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the time in the context to the phase `name`."""
    seconds, outer = _seconds.get(), _within.get()
    if seconds is None:
        yield
        return
    began, inner = time.perf_counter(), [0.0]
    token = _within.set(inner)
    try:
        yield
    finally:
        _within.reset(token)
        passed = time.perf_counter() - began
        seconds[name] = seconds.get(name, 0.0) + passed - inner[0]
        if outer is not None:
            outer[0] += passed

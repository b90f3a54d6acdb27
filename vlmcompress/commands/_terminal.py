"""What the command line shows, and where: results on stdout, everything else on stderr, bars only on a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator

from vlmcompress.common.text import duration


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Within the block everything that anybody prints, child processes and C libraries included, goes to stderr."""
    kept = sys.stdout
    kept.flush()
    descriptor = os.dup(1)
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(descriptor, 1)
        os.close(descriptor)
        sys.stdout = kept


def quiet_libraries() -> None:
    """Silence what the libraries log, warn and draw. Variables that the user has set stay; call before importing any."""
    for name, value in {
        "LLM_COMPRESSOR_LOG_LEVEL": "ERROR",
        "LOGURU_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


class Progress:
    """A bar with the time left on stderr; nothing where stderr is no terminal. Call it with (label, done, total)."""

    WIDTH = 28
    PERIOD = 0.1  # seconds between two drawings

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._label = ""
        self._start = self._last = 0.0
        self._first = 0

    def __call__(self, label: str, done: int, total: int) -> None:
        if not self._shown or total <= 0:
            return
        now = time.monotonic()
        if label != self._label:
            self.close()
            self._label, self._start, self._first, self._last = label, now, done, 0.0
        if now - self._last < self.PERIOD and done < total:
            return
        self._last = now
        filled = self.WIDTH * done // total
        bar = "#" * filled + "-" * (self.WIDTH - filled)
        sys.stderr.write(f"\r\x1b[K{label:<28.28} [{bar}] {done / total:4.0%}  {self._time_left(now, done, total)}")
        sys.stderr.flush()

    def close(self) -> None:
        """End the line of the current bar."""
        if self._shown and self._label:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._label = ""

    def _time_left(self, now: float, done: int, total: int) -> str:
        passed, steps = now - self._start, done - self._first
        if done >= total:
            return f"in {duration(passed)}"
        return f"{duration(passed / steps * (total - done))} left" if steps > 0 and passed > 1 else ""

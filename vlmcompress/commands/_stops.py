"""Signals that ask the process to end, as exceptions, so that what it started and locked is cleaned up as after Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from vlmcompress.common import distributed

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Raised in the main thread by one of `SIGNALS`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Within the context `SIGNALS` raise `Stopped`; a second one of a kind ends the process at once.

    A signal that whoever started the process ignores stays ignored, as under `nohup`; Python treats SIGINT so by itself. One
    that has a handler keeps it. Workers other than the first have nothing to say, and end at once.
    """
    main = threading.current_thread() is threading.main_thread()
    taken = [
        number for number in SIGNALS if main and distributed.is_main() and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in taken:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Stopped(number)

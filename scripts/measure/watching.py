"""Call a function again and again while other work goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watching(look: Callable[[], None], period: float) -> Iterator[None]:
    """Call `look` every `period` seconds as long as the block lasts."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(period):
            look()

    watcher = threading.Thread(target=loop, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()

"""A work folder that has begun, and a disk with little room."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlmcompress.utils.work_folder import WorkFolder


def begun(out: Path, *, restart: bool = False, **settings: Any) -> WorkFolder:
    """The work folder of `out`, for a run with these settings."""
    work = WorkFolder(out, restart)
    work.begin({"command": "test", **settings})
    return work


@contextlib.contextmanager
def little_room(size: int = 4096) -> Iterator[None]:
    """Within the context no file of this process gets longer than `size` bytes, which is an error as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)

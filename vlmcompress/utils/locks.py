"""A lock file that one process at a time holds, with the id of that process in it.

The lock is `filelock`'s: the kernel's (flock), so it ends with its process, however that ends. The file is removed on release;
one that a killed process left is taken over.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


class Held(Exception):
    """Raised when another process, or another run of this one, holds the lock: `owner` says which in words."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


@contextlib.contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` within the context.

    Args:
        wait: wait until it is free.

    Raises:
        Held: it is not free.
        OSError: the file cannot be made, or its file system has no locks.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise Held(_owner(path)) from None
    try:
        # On a file system without flock it has become a SoftFileLock, which writes these lines itself.
        if type(lock) is FileLock:
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # before the release: whoever waits sees that its open file has no name any more
        lock.release()


def _owner(path: Path) -> str:
    """The process in the lock file, in words, with its host where that is another one."""
    try:
        pid, host = path.read_text().split()[:2]
    except (OSError, ValueError):
        return "a process that has just begun or ended"
    return f"process {pid}" if host == socket.gethostname() else f"process {pid} on {host}"

"""A lock file that one process at a time holds, with the id of that process in it.

`filelock` uses the kernel's lock (flock), which ends with its process in any case. The file is removed on release; one left by
a killed process is taken over.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from vlmcompress.utils.errors import UserError


@contextlib.contextmanager
def held(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` within the context.

    Args:
        what: the holder's activity, for the message: `writing OUT`.
        wait: wait until the lock is free.

    Raises:
        UserError: another process, or another run in this one, holds the lock.
        OSError: the file cannot be created, or its file system does not support locks.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        owner, where = _owner(path), ""
        if " on " in owner:  # a lock of another host's process may outlive it
            where = f" (if it has ended, remove {path})"
        raise UserError(
            f"another run, {owner}, is {what} now; wait for it, end it{where}, or choose another output"
        ) from None
    try:
        # On a file system without flock it has become a SoftFileLock, which writes these lines itself.
        if type(lock) is FileLock:
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # before the release: waiting processes see that their open file was unlinked
        lock.release()


def _owner(path: Path) -> str:
    """A description of the process in the lock file, with its host if that is another one."""
    try:
        pid, host = path.read_text().split()[:2]
    except (OSError, ValueError):
        return "a process that has just begun or ended"
    return f"process {pid}" if host == socket.gethostname() else f"process {pid} on {host}"

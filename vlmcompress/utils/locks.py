"""A lock file that one process at a time holds, with the id of that process in it.

The lock is the kernel's (flock), so it ends with its process, however that ends; NFS, and Lustre mounted with `flock`, share it
between machines. On a file system without locks the process id in the file is the lock: it holds while that process is alive,
which only processes on the same machine can tell. The file is removed on release; one that a killed process left is taken over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_PAUSE = 0.1  # seconds between two looks at a file that another process holds
_NOTE_TAKES = 1.0  # seconds within which a new holder has written its note


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
        OSError: the file cannot be made.
    """
    while True:
        try:
            descriptor = _taken(path)
            break
        except Held:
            if not wait:
                raise
            time.sleep(_PAUSE)
    try:
        yield
    finally:
        # In this order: whoever opened the file before it was removed sees that it is not the one that has the name.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _taken(path: Path) -> int:
    """Lock the file that has the name `path`, write the note, and return the open file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if _locked(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _locked(descriptor: int, path: Path) -> bool:
    """Lock an open file and write the note; False where the name `path` is another file's by now."""
    note = f"{os.getpid()} {socket.gethostname()} {os.urandom(8).hex()}\n"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Held(_owner(path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if _lives(path):
            raise Held(_owner(path)) from None
        _write(descriptor, note)
        time.sleep(_PAUSE)  # of two that come at once the later one stays
        if _note(path) != note:
            raise Held(_owner(path)) from None
        return True
    try:
        same = os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
    if same:
        _write(descriptor, note)
    return same


def _write(descriptor: int, note: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note.encode(), 0)


def _note(path: Path) -> str:
    """The content of the lock file: process id, host name and a random token; "" where it is gone or empty."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _lives(path: Path) -> bool:
    """Whether the process in the lock file may be alive; one of another host always may."""
    pid, host = (*_note(path).split(), "", "")[:2]
    if not pid.isdigit() or host != socket.gethostname():
        return pid.isdigit()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _owner(path: Path) -> str:
    """The process in the lock file, in words, with its host where that is another one."""
    until = time.monotonic() + _NOTE_TAKES
    while not (note := _note(path).split()) and time.monotonic() < until:
        time.sleep(0.01)
    pid, host = (*note, "", "")[:2]
    if not pid.isdigit():
        return "a process that is just ending"
    return f"process {pid}" if host == socket.gethostname() else f"process {pid} on {host}"

"""Which processes live, from /proc. Waits are long, as a loaded machine makes processes late; they end when they can."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def session_members(session: int) -> list[str]:
    """Living processes of a session, from /proc."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        state, _, _, of = rest.split()[:4]
        if int(of) == session and state != "Z":
            members.append(name)
    return members


def session_ends(session: int, seconds: float = 120.0) -> bool:
    """Whether all of a session's processes are gone before the time is up."""
    end = time.monotonic() + seconds
    while session_members(session) and time.monotonic() < end:
        time.sleep(0.2)
    return not session_members(session)


def folder_is_left(folder: Path, seconds: float = 120.0) -> bool:
    """Whether no process works in a folder before the time is up."""

    def occupied() -> bool:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "cwd").readlink() == folder:
                    return True
        return False

    end = time.monotonic() + seconds
    while occupied() and time.monotonic() < end:
        time.sleep(0.2)
    return not occupied()

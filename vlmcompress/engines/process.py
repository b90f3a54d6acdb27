"""Processes of engines: started in a session of their own, ended with all their children, and the errors in their logs.

A worker's standard input is its lifeline: it is held open here and closes when this process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

LOG_VARIABLE = "VLMCOMPRESS_ENGINE_LOG"


def start(command: Sequence[str], environment: dict[str, str], log: Path, *, piped: bool = True) -> subprocess.Popen:
    """Start a process that leads a session and holds a lifeline.

    Args:
        log: file for its standard error, overwritten.
        piped: read its standard output from a pipe; False: write it to the log, too.
    """
    with open(log, "wb") as sink:
        out = subprocess.PIPE if piped else sink
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=sink, start_new_session=True
        )


def stop(process: subprocess.Popen, grace: float = 5.0) -> None:
    """End a process that leads a session, with all its children: by SIGTERM, after `grace` seconds by SIGKILL."""
    for sig, wait in ((signal.SIGTERM, grace if process.poll() is None else 0.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def how_it_ended(code: int) -> str:
    """Describe an exit status in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def keep(log: Path) -> None:
    """Append a log to the file that `VLMCOMPRESS_ENGINE_LOG` names, if it names one."""
    if kept := os.environ.get(LOG_VARIABLE):
        with open(kept, "ab") as file:
            file.write(log.read_bytes())


_PREFIX = re.compile(r"^(\([\w ]+pid=\d+\)\s*)?((ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^]]*\]\s*)?")
_NOISE = re.compile(
    r"$|Traceback |File \"|[~^]+$|raise |return |[\w.]*ValidationError: \d+ validation |Fatal Python error: _enter_buff"
)
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b|.*(error:|\[type=\w+, |Killed|out of memory)")
_GIVEN = re.compile(r" \[type=\w+, .*")  # pydantic shows what it was given behind what is wrong with it


def last_words(log: Path, most: int = 3) -> str:
    """The last distinct error lines of a log, or else its last lines, as `: a | b`; empty for an empty log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [_PREFIX.sub("", line.strip()).strip() for line in re.split(r"[\r\n]+", text)]
    lines = [line for line in lines if not _NOISE.match(line)]
    errors = [line for line in lines if _ERROR.match(line)]
    words = list(dict.fromkeys(_GIVEN.sub("", line) for line in errors or lines))[-most:]
    return ": " + " | ".join(line[:300] for line in words) if words else ""

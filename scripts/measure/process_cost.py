"""What a process costs, for scripts that compare whole processes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def process_cost(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command with one thread of arithmetic: seconds of the clock (`seconds`) and of the processor (`user`, `system`),
    the peak of anonymous memory, its children's included, looked at twenty times a second (`anonymous`), bytes from and to the
    disk (`read`, `written`).

    Args:
        command: `vlmcompress` as its first word is the one of this checkout.
        folder: the working folder.

    Raises:
        SystemExit: the command failed.
    """
    if command[0] == "vlmcompress":
        command = [sys.executable, "-m", *command]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    with subprocess.Popen(command, cwd=folder, stdout=sys.stderr, env=os.environ | settings) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(_anonymous, _family(process.pid))))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds,
        "anonymous": peak,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "read": 512 * (after.ru_inblock - before.ru_inblock),
        "written": 512 * (after.ru_oublock - before.ru_oublock),
    }


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    with contextlib.suppress(OSError):  # it has ended
        children = [
            int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
        ]
        return [pid, *(member for child in children for member in _family(child))]
    return []


def _anonymous(pid: int) -> int:
    with contextlib.suppress(OSError):
        line = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(line[1]) * 1024 if line else 0
    return 0

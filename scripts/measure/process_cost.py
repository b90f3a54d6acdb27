"""What a process costs, for scripts that compare whole processes."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def process_cost(command: list[str], folder: Path, core: int | None = None) -> dict[str, float]:
    """Run a command with one thread of arithmetic: seconds of the clock (`seconds`) and of the processor (`user`, `system`),
    the peak of anonymous memory looked at twenty times a second (`anonymous`), bytes from and to the disk (`read`, `written`).

    Args:
        command: `vlmcompress` as its first word is the one of this checkout.
        folder: the working folder.
        core: the only processor core that it may use; None: all.

    Raises:
        SystemExit: the command failed.
    """
    if command[0] == "vlmcompress":
        command = [sys.executable, "-m", *command]
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    with subprocess.Popen([*pinned, *command], cwd=folder, stdout=sys.stderr, env=os.environ | settings) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *(int(kib) * 1024 for kib in re.findall(r"RssAnon:\s+(\d+)", status))])
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

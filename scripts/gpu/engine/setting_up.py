"""Create the environment with `scripts/setup`, which does nothing if it is up to date. Needs a package index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from typing import Any

from gpu.machine import ROOT
from gpu.part import Failed, Place, Skipped, last_lines

_NO_INDEX = re.compile(
    r"Temporary failure in name resolution|Could not find a version|No matching distribution|ConnectionError|"
    r"NewConnectionError|[Nn]etwork is unreachable|dns error|error sending request|Failed to fetch|timed out"
)


def run(place: Place) -> dict[str, Any]:
    """Run the script."""
    if named := os.environ.get("VLMCOMPRESS_CHECK_PYTHON"):
        raise Skipped(f"--python names {named}, which is used unchanged")
    if place.tiny:
        raise Skipped("tiny shapes run in the environment that is there")
    if not (ROOT / ".venv" / ".vlmcompress-stamp").exists():  # an incomplete environment is useless
        with tempfile.TemporaryDirectory() as folder:
            said, code = said_by(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "0", "--timeout",
                                 "15", "-d", folder, "uv")  # fmt: skip
        if code:
            raise Skipped(f"no package index can be reached: {last_lines(said, 1)[0]}")
    said, code = said_by(str(ROOT / "scripts" / "setup"))
    if code == 0:
        return {"made": True}
    words = "\n".join(last_lines(said, 4))
    if _NO_INDEX.search(said):
        raise Skipped(f"no package index can be reached: {words.splitlines()[-1]}")
    raise Failed(f"scripts/setup ended with exit code {code}\n{words}")


def said_by(*command: str) -> tuple[str, int]:
    """Run a command; returns what it printed, which goes to the log, too, and its exit code."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    return done.stdout, done.returncode

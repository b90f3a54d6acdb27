"""Make the environment with `scripts/setup`, which does nothing where it is up to date. Needs a package index."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

from gpu.machine import ROOT
from gpu.part import Failed, Place, Skipped, last_lines

_NO_INDEX = re.compile(
    r"Temporary failure in name resolution|Could not find a version|No matching distribution|ConnectionError|"
    r"NewConnectionError|[Nn]etwork is unreachable|dns error|error sending request|Failed to fetch|timed out"
)


def run(place: Place) -> dict[str, Any]:
    """Run the script; returns which engine's packages it installed."""
    if named := os.environ.get("VLMCOMPRESS_CHECK_PYTHON"):
        raise Skipped(f"--python names {named}, which is taken as it is")
    if place.tiny:
        raise Skipped("tiny shapes run in the environment that is there")
    done = subprocess.run([str(ROOT / "scripts" / "setup")], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    print(said)
    if done.returncode == 0:
        return {"environment": str(ROOT / ".venv")}
    words = "\n".join(last_lines(said, 4))
    if _NO_INDEX.search(said):
        raise Skipped(f"no package index can be reached: {words.splitlines()[-1]}")
    raise Failed(f"scripts/setup ended with exit code {done.returncode}\n{words}")

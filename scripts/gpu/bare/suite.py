"""The default test suite in pieces of under ten minutes: what is quick, what loads models, what starts vLLM.

Tiny shapes run one quick folder and only collect the others, as the suite is what runs this.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.machine import ROOT
from gpu.part import Failed, Place, last_lines

SECONDS = 540
MARKS = {"quick": "not slow and not engine", "models": "not slow and not engine", "engines": "engine and not slow"}
_LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)


def run(place: Place, piece: str) -> dict[str, Any]:
    """Run a piece: `quick`, or `models-1-2` for the first of two."""
    kind, *which = piece.split("-")
    test_files = files(kind)
    if which:
        test_files = test_files[int(which[0]) - 1 :: int(which[1])]
    collect = place.tiny and kind != "quick"
    if place.tiny and kind == "quick":
        test_files = [ROOT / "tests" / "targets"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", MARKS[kind], *map(str, test_files)]
    said, code = said_by([*command, "--collect-only" if collect else "-vv"])  # the project's own options have one -q
    if collect:
        counts: dict[str, Any] = {"collected": len(re.findall(r"^\S+::|^\S+\.py: \d+", said, re.MULTILINE))}
        if code or not counts["collected"]:
            raise Failed("\n".join(["nothing could be collected", *last_lines(said, 5)]), counts)
        return {"files": len(test_files), **counts}
    ends = [status for _, status in _LINE.findall(said)]
    failed = [name for name, status in _LINE.findall(said) if status in ("FAILED", "ERROR")]
    result = {"files": len(test_files), "passed": ends.count("PASSED"), "failed": sorted(set(failed))}
    if code is None:
        passed = f"{result['passed']} had passed, {len(failed)} had failed"
        raise Failed(f"not done after {SECONDS / 60:g} minutes, {passed}", result)
    if code or not result["passed"]:
        raise Failed("\n".join([f"{len(failed)} failed", *(result["failed"][:6] or last_lines(said, 5))]), result)
    return result


def files(kind: str) -> list[Path]:
    """Test files of a kind: those from which nothing heavy can be reached by imports, the others, those with engines."""
    sys.path.insert(0, str(ROOT))
    from tests.conftest import reaches

    every = sorted((ROOT / "tests").glob("**/test_*.py"))
    if kind == "engines":
        return [file for file in every if "mark.engine" in file.read_text(encoding="utf-8")]
    return [file for file in every if reaches(file) == (kind == "models")]


def said_by(command: list[str]) -> tuple[str, int | None]:
    """Run pytest; returns what it printed and its exit code, None if the time was up."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False
        )
        print(done.stdout)
        return done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        print(said)
        return said, None

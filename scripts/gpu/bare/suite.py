"""The default test suite in pieces of under ten minutes, as far as the Python that runs it can run it.

`pure` are the tests that use no model, `device` those of what works on the accelerator where there is one: these two take torch
and transformers, and skip what imports a package that is not installed. `models` are all that load models, `engines` those
that start vLLM. Tiny shapes run one quick folder and only collect the others, as the suite is what runs this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gpu.machine import ROOT
from gpu.part import Failed, Place, last_lines

SECONDS = 540
DEVICE = ("quantization", "reduction", "training")  # folders of tests
_OURS = {"vlmcompress", "tests", "eval", "gpu"}


def run(place: Place, piece: str) -> dict[str, Any]:
    """Run a piece: `pure`, `device`, or `models-1-2` for the first of two."""
    kind, *which = piece.split("-")
    test_files = files(kind)
    if which:
        test_files = test_files[int(which[0]) - 1 :: int(which[1])]
    collect = place.tiny and kind != "pure"
    if place.tiny and kind == "pure":
        test_files = [ROOT / "tests" / "recipe"]
    marks = "engine and not slow" if kind == "engines" else "not slow and not engine"
    command = [sys.executable, "-m", "pytest", *plugins(), "-m", marks, *map(str, test_files)]
    report = place.work / f"tests-{piece}.xml"
    report.unlink(missing_ok=True)
    said, code = said_by([*command, *(["--collect-only"] if collect else [f"--junitxml={report}"])])
    if collect:
        counts: dict[str, Any] = {"collected": len(re.findall(r"^\S+::|^\S+\.py: \d+", said, re.MULTILINE))}
        if code or not counts["collected"]:
            raise Failed("\n".join(["nothing could be collected", *last_lines(said, 5)]), counts)
        return {"files": len(test_files), **counts}
    if code is None:
        raise Failed("\n".join([f"not done after {SECONDS / 60:g} minutes", *last_lines(said, 3)]))
    result = {"files": len(test_files), **ends(report)}
    if code or not result["passed"]:
        failed = result["failed"]
        raise Failed("\n".join([f"{len(failed)} failed", *(failed[:6] or last_lines(said, 5))]), result)
    return result


def ends(report: Path) -> dict[str, Any]:
    """How many tests passed and were skipped, and the names of those that failed, from pytest's report."""
    states: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        states[state].append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "passed": len(states["passed"]),
        "skipped": len(states["skipped"]),
        "failed": sorted(set(states["failed"])),
    }


def plugins() -> list[str]:
    """Options that load this module and, of what is installed next to pytest, what the suite is run with: nothing else."""
    options = ["-p", "no:cacheprovider", "-p", "gpu.bare.suite"]
    if find_spec("pytest_timeout"):
        options += ["-p", "pytest_timeout"]
    if find_spec("xdist") and (os.cpu_count() or 1) > 2:
        options += ["-p", "xdist", "-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"]
    return options


def files(kind: str) -> list[Path]:
    """Test files of a kind."""
    sys.path.insert(0, str(ROOT))
    from tests.conftest import has_engine
    from tests.kit.imports import reaches

    every = sorted((ROOT / "tests").glob("**/test_*.py"))
    if kind == "engines":
        return [file for file in every if has_engine(file)]
    if kind == "models":
        return [file for file in every if reaches(file)]
    folders = [ROOT / "tests" / name for name in DEVICE]
    chosen = every if kind == "pure" else [file for file in every if {*folders} & {*file.parents}]
    return [file for file in chosen if reaches(file) == (kind == "device")]


def pytest_configure(config: pytest.Config) -> None:
    """Marks of tests are known, also where the plugin that reads them is not installed."""
    config.addinivalue_line("markers", "timeout: seconds that a test may take (pytest-timeout)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """A test that fails for want of another package is skipped: on a bare machine there are few."""
    return _excused((yield), call, item.path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """So is a file that can't be imported for want of one."""
    report = yield
    return _excused(report, getattr(report, "call", None), collector.path)


def _excused(report: Any, call: pytest.CallInfo | None, path: Path) -> Any:
    error: BaseException | None = call.excinfo.value if call and call.excinfo else None
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    if error is not None and str(error.name).partition(".")[0] not in _OURS:
        report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: there is no {error.name}")
    return report


def said_by(command: list[str]) -> tuple[str, int | None]:
    """Run pytest; returns what it printed and its exit code, None if the time was up."""
    # Whatever else is installed there is left out; and tests compare with a CPU, which has no TF32.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        print(done.stdout)
        return done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        print(said)
        return said, None

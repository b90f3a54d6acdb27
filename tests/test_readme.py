"""README says what is: its commands parse and run, its tables are what the scripts print, its tree exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vlmcompress import cli
from vlmcompress.results import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = [line.strip() for line in README.splitlines() if line.startswith("    ")]


def between(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", README, re.DOTALL)
    assert found, f"README has no section marked {name}"
    return found.group(1).strip()


@pytest.mark.parametrize("line", [line for line in BLOCKS if re.match(r"(\$ )?vlmcompress ", line)])
def test_commands_parse(line):
    words = shlex.split(line.removeprefix("$ "), comments=True)
    assert cli.parse(words[1:]).verb in cli.VERBS


@pytest.mark.parametrize("line", [line for line in BLOCKS if line.startswith("scripts/")])
def test_scripts_exist(line):
    assert (ROOT / line.split()[0]).stat().st_mode & 0o111, line


@pytest.mark.parametrize(
    ("script", "section"),
    [
        ("compatibility", "compatibility"),
        ("bench_accuracy", "accuracy"),
        ("bench_methods", "methods"),
        ("bench_reducers", "reducers"),
        ("bench_serving", "serving"),
    ],
)
def test_tables_are_the_measured_ones(script, section):
    command = [sys.executable, f"scripts/{script}.py", "--render"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    json.loads(printed[-1])
    assert between(section) == "\n".join(printed[:-1]), f"run scripts/{script}.py --render and put it into README"


def test_the_tree_exists():
    tree = README.split("## The tree")[1].split("A new scheme")[0]
    for name in re.findall(r"[\w/]+(?:\.py|/)(?=[ ,\n])", tree):
        places = (ROOT / name, ROOT / "vlmcompress" / name)
        assert any(place.exists() for place in places), name


@pytest.mark.engine
def test_the_demo_command(tmp_path):
    """`scripts/demo` on a few questions: a checkpoint, a clean bill from the doctor, a report that passes the gate."""
    command = ["scripts/demo", "demo-llava", "awq", "200", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = load(tmp_path / "report")
    assert results.gate is not None and results.gate.verdict == "pass"
    assert results.suites[0].samples == 200 and results.suites[0].overall.baseline > 0.9
    assert results.candidate.weight_bytes < results.baseline.weight_bytes
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000

"""The main job from one end to the other, as CI's gate."""

from __future__ import annotations

import subprocess

import pytest

from tests.kit.places import ROOT
from vlmcompress.results import load


@pytest.mark.engine
def test_the_demo_command(tmp_path, quick_engines):
    """`scripts/demo` on a few questions: a checkpoint, a clean bill from the doctor, a report that passes the gate."""
    command = ["scripts/demo", "demo-llava", "gptq-plus", "200", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = load(tmp_path / "report")
    assert found.gate is not None and found.gate.verdict == "pass"
    assert found.suites[0].samples == 200 and found.suites[0].overall.baseline > 0.9
    assert found.candidate.weight_bytes < found.baseline.weight_bytes
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000

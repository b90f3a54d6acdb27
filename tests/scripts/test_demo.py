"""The main job from one end to the other, as CI's gate."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kit.places import ROOT
from vlmcompress.evaluation.results import load_results


@pytest.mark.engine
def test_the_demo_command(tmp_path, quick_engines):
    """`scripts/demo` on a few questions: a checkpoint, a clean bill from the doctor, a report that passes the gate."""
    command = ["scripts/demo", "demo-llava", "gptq-plus", "350", str(tmp_path)]
    environment = os.environ | {"VLMCOMPRESS": f"{sys.executable} -m vlmcompress"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = load_results(tmp_path / "report")
    assert results.gate is not None and results.gate.verdict == "pass"
    assert results.suites[0].samples == 350 and results.suites[0].overall.baseline > 0.9
    assert results.candidate.weight_bytes < results.baseline.weight_bytes
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000

"""vLLM's own log of the cache's size: what we work out from config.json alone is the same figure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.kit.places import ROOT


@pytest.mark.engine
@pytest.mark.slow
def test_plan_is_what_vllm_logs():
    """All shapes of the script: windows, FP8, short convolutions, Gated DeltaNet. Exit code 1 where one differs."""
    done = subprocess.run(
        [sys.executable, "scripts/measure/plan_against_vllm.py"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    planned = json.loads(done.stdout.splitlines()[-1])
    assert planned["same"] and len(planned["shapes"]) >= 5

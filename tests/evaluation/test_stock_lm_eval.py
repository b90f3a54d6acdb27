"""The task files give a model the same score in stock lm-eval."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.kit.places import DEMOS, ROOT


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("model", "engine"), [("demo-llava", "vllm"), ("demo-qwen", "hf")])
def test_scores_are_those_of_stock_lm_eval(model: str, engine: str) -> None:
    """Both in float32, so that no answer depends on a rounding."""
    script = [ROOT / "scripts" / "measure" / "compare_lm_eval.py", DEMOS / model]
    run = subprocess.run(
        [sys.executable, *script, "--engine", engine, "--limit", "40"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["same"] and found["samples"] == 40 and len(found["ours"]) == 10
    assert found["equal_answers"] == 40 and sum(found["ours"].values()) / 10 > 0.8

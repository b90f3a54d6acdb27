"""The real engine on reduced checkpoints, in a process of its own, and what is asked of its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.places import ROOT

TOKENS = 8
CACHED = {"enable_prefix_caching": True, "block_size": 32}
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 4}


def probe(jobs: list[dict], folder: Path) -> list[dict]:
    """Run `reduced_probe.py`."""
    pytest.importorskip("vllm")
    given, found = folder / "jobs.json", folder / "found.json"
    given.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.kit.reduced_probe", str(given), str(found)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    assert found.exists(), run.stderr[-3000:]
    return json.loads(found.read_text())


def check(found: dict, expected: list[dict]) -> None:
    """Prompts as long as they should be, the same answers one by one and together, the same positions."""
    assert "error" not in found, found["error"]
    for answers in (*found["passes"], found["together"]):
        assert [len(answer["prompt"]) for answer in answers] == [one["prompt"] for one in expected]
        assert [answer["tokens"] for answer in answers] == [one["tokens"] for one in expected]
    for answers in found["passes"]:
        for answer, one in zip(answers, expected, strict=True):
            assert answer["positions"] == one["positions"][answer["cached"] :]

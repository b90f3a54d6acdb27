"""What a GPU does with our code, shown on a pretended one (`tests/kit/pretended_cuda`), in processes of their own."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.kit import forks, pretended_cuda
from tests.kit.engine import SETTINGS
from tests.kit.places import ROOT

CHECKS = "tests/kit/pretended_cuda/checks"
PHASES = [f"{CHECKS}/{name}.py" for name in ("numbers", "places")]
FOLDERS = sorted(folder.name for folder in (ROOT / "tests").iterdir() if list(folder.glob("test_*.py")))
OTHERS = ["tests/utils/test_hub.py::test_quantize_from_ids_then_offline"]
"""Tests that compare with a Python that is no fork, and so has no such device."""


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    if reason := pretended_cuda.lacking():
        pytest.skip(f"the pretended CUDA device can't be built: {reason}")
    pretended_cuda.built()


def on_the_device(*arguments: str) -> None:
    """Run tests in a process that has imported the libraries."""
    command = [forks.python(*forks.OURS), "-m", "pytest", "-n", "0", "-q", "-p", "tests.kit.pretended_cuda.plugin"]
    environment = os.environ | SETTINGS
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_phases():
    """Numbers are the CPU's, scales are where weights are, blocks are streamed."""
    on_the_device("-x", "-m", "not slow", *PHASES)


@pytest.mark.slow
def test_more_schemes_and_families():
    on_the_device("-m", "slow", *PHASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_default_suite(folder):
    """Tests that start no engine hold where there is an accelerator, too, as `scripts/gpu_check` has them run on one."""
    without = [word for test in OTHERS for word in ("--deselect", test)]
    on_the_device("-m", "not slow and not engine", "-p", "no:cacheprovider", *without, f"tests/{folder}")

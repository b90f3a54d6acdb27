"""What a GPU does with our code, shown on a pretended one (`tests/kit/pretended_cuda`), in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kit import pretended_cuda
from tests.kit.places import ROOT

FILES = (
    *("tests/calibration/test_capture.py", "tests/calibration/test_gradient_pass.py"),
    *("tests/commands/test_learn_reducer.py", "tests/runs/test_counted_reducer.py"),
)
"""Tests that ask for no device, and therefore hold on any."""


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    if reason := pretended_cuda.lacking():
        pytest.skip(f"the pretended CUDA device can't be built: {reason}")
    pretended_cuda.built()


def on_the_device(*arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-x",
        "-p",
        "tests.kit.pretended_cuda.plugin",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_everything():
    """Scales where the weights are, blocks that are streamed, copies that need not be, and what makes the host wait."""
    on_the_device("tests/kit/pretended_cuda/checks.py")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_files(file):
    on_the_device(file)

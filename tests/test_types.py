"""Types, by mypy: as a test, so that it takes its turn with the others and is not a third process on two cores."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.places import ROOT


def test_types() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

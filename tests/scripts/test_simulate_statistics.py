"""The simulation of the statistics: a small run's rates are within their levels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.kit.places import ROOT


@pytest.mark.slow
def test_quick_simulation() -> None:
    """200 evaluations a rate: 2.5% are seen as at most 6%, 80% as 60 to 95%."""
    command = [sys.executable, ROOT / "scripts" / "measure" / "simulate_statistics.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["evaluations"] == 1600
    assert results["false_pass_worst"] <= 0.06 and results["false_fail_worst"] <= 0.06
    assert results["false_fail_no_drop_worst"] <= 0.02
    assert results["coverage_worst"] >= 0.91
    assert results["bootstrap_false_pass_at_margin"] > results["false_pass_at_margin"]
    assert min(results["power_at_detectable"]) >= 0.6 and max(results["power_at_detectable"]) <= 0.95
    assert min(results["decided_with_needed"]) >= 0.6 and max(results["decided_with_needed"]) <= 0.95
    assert results["families"]["any_fails"] <= 0.1 and results["families"]["all_pass"] <= 0.1

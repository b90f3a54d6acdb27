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
    margin, level = 0.01, 0.06
    wrong_passes = [row["pass"] for row in results["settings"] if row["drop"] >= margin]
    wrong_fails = [row["fail"] for row in results["settings"] if row["drop"] <= margin]
    assert len(wrong_passes) == 4 and max(wrong_passes) <= level and max(wrong_fails) <= level
    assert all(rates[name] <= level for mix in results["sizes"] for rates in mix["wrong"].values() for name in rates)
    assert all(max(row["pass"], row["fail"]) <= level for row in results["few_images"])
    assert min(row["coverage"] for row in results["settings"]) >= 0.91
    assert min(results["power_at_detectable"]) >= 0.6 and min(results["decided_with_needed"]) >= 0.5
    assert results["families"]["any_fails"] <= 0.1 and results["families"]["all_pass"] <= 0.1

"""The simulation of searches: its worlds are what they say, and a small run keeps its floor."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.kit.places import ROOT
from vlmcompress.evaluation.accuracy.compare import compare

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import simulate_search as simulation


@pytest.mark.parametrize("count, runs", [(0, 40), (3, 1000), (25, 1000), (7, 7)])
def test_interval_is_the_exact_one(count, runs) -> None:
    expected = binomtest(count, runs).proportion_ci(0.95, "exact")
    assert simulation.interval(count, runs) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize("loss", [-0.001, 0.0005, 0.02, 0.08])
def test_answers_lose_what_they_should(loss) -> None:
    """Over many questions; divergence has a median far below its mean, and some nats at most."""
    sheet = simulation.Sheet(np.random.default_rng(0), 300_000)
    answers, divergences = sheet.answers(simulation.GRID[-1], loss)
    assert float(answers.mean()) == pytest.approx(-loss, abs=5 * np.sqrt(np.var(answers) / 300_000) * 1.5)
    assert set(np.unique(answers)) == {-1.0, 0.0, 1.0}
    assert not (answers[sheet.right] > 0).any() and not (answers[~sheet.right] < 0).any()
    assert divergences.max() <= simulation.MOST and np.median(divergences) < divergences.mean() / 50


def test_confirming_is_what_eval_does() -> None:
    """Oracle: `compare` of both models' scores."""
    world = simulation.World(np.random.default_rng(3))
    for candidate in (simulation.GRID[0], simulation.GRID[7], simulation.GRID[-1]):
        changes = world.final.answers(candidate, world.losses[candidate.name])[0]
        before = world.final.right.astype(float)
        verdict = compare(before, before + changes, world.final.images, margin=0.02).verdict
        assert world.confirmed(candidate, 0.02) == verdict


def test_a_small_simulation() -> None:
    """Eight worlds: hardly a floor is broken, and the search asks a tenth of the grid's questions for most of its gain."""
    command = [sys.executable, ROOT / "scripts" / "measure" / "simulate_search.py", "--runs", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results["floors"]) == {"0.01", "0.02", "0.03"}
    for rows in results["floors"].values():
        assert set(rows) == {*simulation.METHODS, "search, at odds", "truth, at odds"}
        assert rows["search"]["broken"] <= 0.125 and rows["search"]["asked"] < 0.15 < rows["grid"]["asked"] == 1
    gains = {method: sum(rows[method]["gain"] for rows in results["floors"].values()) for method in simulation.METHODS}
    assert gains["search"] > 0.75 * gains["truth"]

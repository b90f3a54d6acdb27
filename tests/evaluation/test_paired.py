"""The statistics against slow, obvious versions and against simulation."""

from __future__ import annotations

from itertools import product
from math import comb
from random import Random

import pytest
from scipy.stats import binomtest

from vlmcompress.evaluation.paired import compare, design_effect, sign_flip_p, tango


@pytest.mark.parametrize("gained, lost", [(0, 0), (0, 1), (1, 0), (3, 3), (0, 5), (9, 2), (20, 31)])
def test_p_is_exact_mcnemar_without_clusters(gained: int, lost: int) -> None:
    """Oracles: scipy's exact binomial test of the discordant pairs, and the binomial sum written out."""
    p = sign_flip_p([1] * gained + [-1] * lost + [0] * 7)
    n = gained + lost
    assert p == pytest.approx(binomtest(gained, n).pvalue if n else 1.0)
    tail = sum(comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(gained - lost))
    assert p == pytest.approx(tail / 2**n)


@pytest.mark.parametrize("sums", [[2, -1, 1], [3, 3, -2, 1, 0], [-1, -1, -4, 2, 2, 1]])
def test_p_with_clusters_enumerates_all_signs(sums: list[int]) -> None:
    """Oracle: all 2^k sign choices, one by one."""
    totals = [abs(sum(s * sign for s, sign in zip(sums, signs, strict=True)))
              for signs in product((-1, 1), repeat=len(sums))]  # fmt: skip
    assert sign_flip_p(sums) == pytest.approx(sum(t >= abs(sum(sums)) for t in totals) / len(totals))


@pytest.mark.parametrize("n", [1, 10, 200])
def test_interval_without_discordant_pairs(n: int) -> None:
    """Closed form: +-z^2 / (n + z^2)."""
    z2 = 1.959963985**2
    assert tango(0, 0, n) == pytest.approx((-z2 / (n + z2), z2 / (n + z2)), abs=1e-6)


def test_interval_solves_the_score_equation() -> None:
    """Oracle: q maximised on a grid of the multinomial likelihood; the score at the limits is +-z."""
    b, c, n = 9, 3, 60
    from math import log, sqrt

    for delta, target in zip(tango(b, c, n), (1.96, -1.96), strict=True):
        grid = [max(0.0, -delta) + i * 1e-5 for i in range(1, 50000)]
        grid = [q for q in grid if 2 * q + delta < 1]
        q = max(grid, key=lambda q: b * log(q + delta) + c * log(q) + (n - b - c) * log(1 - 2 * q - delta))
        score = (b - c - n * delta) / sqrt(n * (2 * q + delta - delta**2))
        assert score == pytest.approx(target, abs=0.01)


def test_interval_is_antisymmetric_and_inside_bounds() -> None:
    for b, c, n in [(0, 0, 1), (5, 0, 5), (0, 4, 9), (7, 2, 30), (1, 1, 2)]:
        low, high = tango(b, c, n)
        assert -1 <= low <= (b - c) / n <= high <= 1
        assert tango(c, b, n) == pytest.approx((-high, -low), abs=1e-9)


def simulate(rng: Random, clusters: int, size: int, gain: float, loss: float, together: float):
    """Right/wrong of two models; with probability `together` a cluster's questions share their outcome."""
    baseline, candidate, names = [], [], []

    def draw() -> tuple[bool, bool]:
        u = rng.random()
        return (False, True) if u < gain else (True, False) if u < gain + loss else (True, True)

    for cluster in range(clusters):
        shared = draw() if rng.random() < together else None
        for _ in range(size):
            b, c = shared or draw()
            baseline.append(b)
            candidate.append(c)
            names.append(cluster)
    return baseline, candidate, names


@pytest.mark.parametrize(
    "clusters, size, gain, loss, together, least",
    [
        (40, 1, 0.02, 0.02, 0.0, 0.94),
        (100, 1, 0.05, 0.10, 0.0, 0.93),
        (300, 1, 0.01, 0.0, 0.0, 0.93),
        (120, 3, 0.05, 0.08, 0.0, 0.93),
        (120, 3, 0.05, 0.08, 0.9, 0.92),
    ],
)
def test_interval_covers_the_truth(clusters, size, gain, loss, together, least) -> None:
    """Simulation: 95% intervals hold the true difference about 95% of the time, dependent questions or not."""
    rng = Random(7)
    runs = [compare(*simulate(rng, clusters, size, gain, loss, together)) for _ in range(500)]
    covered = sum(r.low <= gain - loss <= r.high for r in runs) / len(runs)
    assert least <= covered <= 1.0


def test_ignoring_the_images_would_be_wrong() -> None:
    """Simulation: the same dependent data without cluster names covers clearly too rarely, so the clusters matter."""
    rng = Random(7)
    runs = [compare(*simulate(rng, 120, 3, 0.05, 0.08, 0.9)[:2]) for _ in range(300)]
    assert sum(r.low <= -0.03 <= r.high for r in runs) / len(runs) < 0.88


def test_p_under_the_null_is_uniform_or_larger() -> None:
    """Simulation: no true difference gives p <= 0.05 in at most about 5% of runs, with dependent questions too."""
    rng = Random(3)
    runs = [compare(*simulate(rng, 60, 3, 0.06, 0.06, 0.8)) for _ in range(400)]
    assert sum(r.p <= 0.05 for r in runs) / len(runs) <= 0.07


def test_design_effect() -> None:
    """Fully dependent pairs: 2. Independent: 1, never below. No variance: 1."""
    assert design_effect([1, 1, 0, 0, -1, -1, 0, 0] * 5, [i // 2 for i in range(40)]) == pytest.approx(2.0, rel=0.05)
    assert design_effect([1, -1] * 20, [i // 2 for i in range(40)]) == 1.0
    assert design_effect([0] * 6, range(6)) == 1.0


def test_counts() -> None:
    r = compare([True, True, False, False, True], [True, False, True, False, True], [0, 0, 1, 2, 3])
    assert (r.both, r.baseline_only, r.candidate_only, r.neither, r.clusters) == (2, 1, 1, 1, 4)
    assert (r.baseline_accuracy, r.candidate_accuracy, r.difference) == (0.6, 0.6, 0.0)


def test_mismatched_results_are_refused() -> None:
    with pytest.raises(ValueError, match="same, positive number"):
        compare([True], [True, False])
    with pytest.raises(ValueError, match="same, positive number"):
        compare([], [])

"""The statistics against slow, obvious versions and against simulation."""

from __future__ import annotations

from itertools import product
from math import comb
from random import Random
from statistics import fmean, pvariance

import pytest
from scipy.stats import binomtest

from vlmcompress.evaluation.paired import MeanDifference, sign_flip_p, sums_by_image


@pytest.mark.parametrize("gained, lost", [(0, 0), (0, 1), (1, 0), (3, 3), (0, 5), (9, 2), (20, 31)])
def test_p_is_exact_mcnemar_without_clusters(gained: int, lost: int) -> None:
    """Oracles: scipy's exact binomial test of the discordant pairs, and the binomial sum written out."""
    p = sign_flip_p([1] * gained + [-1] * lost + [0] * 7)
    n = gained + lost
    assert p == pytest.approx(binomtest(gained, n).pvalue if n else 1.0)
    tail = sum(comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(gained - lost))
    assert p == pytest.approx(tail / 2**n)


@pytest.mark.parametrize("changes", [[2, -1, 1], [3, 3, -2, 1, 0], [-1, -1, -4, 2, 2, 1]])
def test_p_with_clusters_enumerates_all_signs(changes: list[int]) -> None:
    """Oracle: all 2^k sign choices, one by one."""
    totals = [abs(sum(s * sign for s, sign in zip(changes, signs, strict=True)))
              for signs in product((-1, 1), repeat=len(changes))]  # fmt: skip
    assert sign_flip_p(changes) == pytest.approx(sum(t >= abs(sum(changes)) for t in totals) / len(totals))


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
    runs = [covers(gain - loss, *simulate(rng, clusters, size, gain, loss, together)) for _ in range(500)]
    assert fmean(runs) >= least


def test_ignoring_the_images_would_be_wrong() -> None:
    """Simulation: the same dependent data without cluster names covers clearly too rarely, so the clusters matter."""
    rng = Random(7)
    assert fmean(covers(-0.03, *simulate(rng, 120, 3, 0.05, 0.08, 0.9)[:2]) for _ in range(300)) < 0.88


def covers(truth: float, baseline, candidate, names=None) -> bool:
    """Whether the 95% interval holds the truth: neither p-value is below 2.5%."""
    difference = MeanDifference([int(c) - int(b) for b, c in zip(baseline, candidate, strict=True)], names)
    return min(difference.p_at_most(truth), difference.p_at_least(truth)) >= 0.025


def test_p_under_the_null_is_uniform_or_larger() -> None:
    """Simulation: no true difference gives p <= 0.05 in at most about 5% of runs, with dependent questions too."""
    rng, small = Random(3), 0
    for _ in range(400):
        baseline, candidate, names = simulate(rng, 60, 3, 0.06, 0.06, 0.8)
        d = [int(c) - int(b) for b, c in zip(baseline, candidate, strict=True)]
        small += sign_flip_p([round(s) for s in sums_by_image(d, names)[0]]) <= 0.05
    assert small / 400 <= 0.07


def test_design_effect() -> None:
    """Fully dependent pairs: 2. Independent: 1, never below. Nothing changed: as if dependent, so that images count."""

    def effect(differences, names):
        return MeanDifference(differences, names).design_effect

    assert effect([1, 1, 0, 0, -1, -1, 0, 0] * 5, [i // 2 for i in range(40)]) == pytest.approx(2.0)
    assert effect([1, -1] * 20, [i // 2 for i in range(40)]) == 1.0
    assert effect([0] * 6, range(6)) == 1.0
    assert effect([0] * 6, [0, 0, 0, 1, 1, 1]) == pytest.approx(3.0)


def test_design_effect_is_kishs_with_much_data() -> None:
    """Oracle: the variance of the mean over many simulated evaluations, by that of independent samples."""
    rng = Random(5)
    means, effects, variances = [], [], []
    for _ in range(400):
        baseline, candidate, names = simulate(rng, 150, 3, 0.1, 0.1, 0.6)
        d = [int(c) - int(b) for b, c in zip(baseline, candidate, strict=True)]
        means.append(fmean(d))
        effects.append(MeanDifference(d, names).design_effect)
        variances.append(pvariance(d) / len(d))
    assert fmean(effects) == pytest.approx(pvariance(means) / fmean(variances), rel=0.2)

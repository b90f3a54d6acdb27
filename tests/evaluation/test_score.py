"""The score statistic against published examples, brute force and exact error rates."""

from __future__ import annotations

import math
from math import comb

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import multinomial

from vlmcompress.evaluation.score import Score

QUANTILE = 1.959963985


def changes(gained: int, lost: int, n: int) -> list[int]:
    return [1] * gained + [-1] * lost + [0] * (n - gained - lost)


@pytest.mark.parametrize(
    "gained, lost, n, low, high",
    [
        (1, 7, 21, -0.517, -0.026),  # Fagerland, Lydersen and Laake (2014), table II, after Tango
        (16, 8, 86, -0.020, 0.207),  # Agresti and Min (2005)
    ],
)
def test_uncorrected_interval_is_tangos(gained, lost, n, low, high) -> None:
    """Published limits, three decimals."""
    assert Score(changes(gained, lost, n), corrected=False).limits(0.95) == pytest.approx((low, high), abs=5e-4)


def test_skewness_correction_is_lauds() -> None:
    """Published: -0.528113 to -0.018422 for the first example with Laud's skewness and variance corrections.

    The latter makes the variance of the score n / (n - 1) as large; ours is a design effect, taken into the skewness also.
    """
    score = Score(changes(1, 7, 21))
    score.continuity = 0.0
    low, high = (_solve(score, sign * QUANTILE, factor=21 / 20) for sign in (1, -1))
    assert (low, high) == pytest.approx((-0.528113, -0.018422), abs=2e-5)


def _solve(score: Score, target: float, factor: float) -> float:
    """The mean at which Laud's statistic with a variance `factor` as large is `target`."""

    def excess(mean: float) -> float:
        variance, third = score.moments(mean)
        variance *= factor
        t = (score.mean - mean) / math.sqrt(variance / score.n)
        return t - third / (6 * variance**1.5 * math.sqrt(score.n)) * (target**2 - 1) - target

    low, high = (-0.99, score.mean) if target > 0 else (score.mean, 0.99)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def test_moments_are_those_of_the_likeliest_distribution() -> None:
    """Oracle: the likelihood of weights on the seen values and -1, 0, 1, maximised by a general optimiser."""
    seen = [0.0] * 20 + [0.5] * 3 + [-0.4] * 2 + [0.25]
    values = np.array([-1.0, -0.4, 0.0, 0.25, 0.5, 1.0])
    counts = np.array([0, 2, 20, 1, 3, 0])
    for mean in (-0.3, -0.1, 0.2):
        rules = [
            {"type": "eq", "fun": lambda w: w.sum() - 1},
            {"type": "eq", "fun": lambda w, mean=mean: w @ values - mean},
        ]
        found = minimize(
            lambda w: -(counts[counts > 0] * np.log(w[counts > 0] + 1e-12)).sum(),
            np.full(6, 1 / 6),
            bounds=[(0, 1)] * 6,
            constraints=rules,
            options={"maxiter": 500, "ftol": 1e-12},
        )
        expected = (found.x @ (values - mean) ** 2, found.x @ (values - mean) ** 3)
        assert Score(seen).moments(mean) == pytest.approx(expected, abs=2e-3)


def enumerated(n: int, gain: float, loss: float) -> tuple[float, float]:
    """Exact probabilities that the lower limit is above the true difference, and the upper one below it."""
    above = below = 0.0
    for gained in range(n + 1 if gain else 1):
        if gain and comb(n, gained) * gain**gained * (1 - gain) ** (n - gained) < 1e-9:
            continue
        for lost in range(n - gained + 1):
            p = float(multinomial.pmf([gained, lost, n - gained - lost], n, [gain, loss, 1 - gain - loss]))
            if p > 1e-9:
                z = Score(changes(gained, lost, n)).z(gain - loss)
                above, below = above + p * (z > QUANTILE), below + p * (z < -QUANTILE)
    return above, below


@pytest.mark.parametrize("gain", [0.0, 0.005, 0.03])
@pytest.mark.parametrize("n, drop", [(60, 0.03), (100, 0.01), (300, 0.01), (400, 0.01), (500, 0.01)])
def test_one_sided_errors_are_exactly_within_their_level(n, drop, gain) -> None:
    """All outcomes enumerated: each limit errs in at most 2.5%. Tango's own upper limit errs in 5% at n = 400, gain 0."""
    above, below = enumerated(n, gain, gain + drop)
    assert above <= 0.025
    assert below <= 0.025


def test_uncorrected_errors_are_not() -> None:
    """The corrections are there for a reason: 8 or more losses of 400 at a rate of 1%, in 5%, refute that rate without them."""
    assert Score(changes(0, 8, 400), corrected=False).z(-0.01) < -QUANTILE < Score(changes(0, 8, 400)).z(-0.01)


@pytest.mark.parametrize(
    "differences",
    [[0] * 50, changes(3, 9, 200), changes(0, 40, 40), [0.3] * 4 + [0] * 60 + [-0.7], [1], [-1 / 3, 2 / 3, 0]],
)
def test_limits(differences) -> None:
    """They surround the estimate, mirror when the sides are swapped, widen with the level and are where |z| is reached."""
    score = Score(differences)
    low, high = score.limits(0.95)
    assert -1 <= low <= score.mean <= high <= 1
    assert Score([-d for d in differences]).limits(0.95) == pytest.approx((-high, -low), abs=1e-9)
    wider = score.limits(0.99)
    assert wider[0] <= low and high <= wider[1]
    for limit, sign in ((low, 1), (high, -1)):
        if abs(limit) < 1 - 1e-9:
            assert score.z(limit) == pytest.approx(sign * QUANTILE, abs=1e-4)


@pytest.mark.parametrize("differences", [changes(0, 0, 30), changes(2, 6, 90), [0.5] * 3 + [0] * 40 + [-0.2] * 5])
def test_z_falls(differences) -> None:
    """A higher hypothetical mean never makes the data look further above it, so that an interval is one piece. Near the
    estimate itself, where the continuity correction makes z zero, it may jump."""
    score = Score(differences)
    z = [z for mean in np.linspace(-0.6, 0.6, 241) if abs(z := score.z(mean)) > 0.3]
    assert len(z) > 200
    assert all(b <= a + 1e-7 for a, b in zip(z, z[1:], strict=False))


def test_more_dependence_is_less_data() -> None:
    independent, dependent = Score(changes(2, 6, 400)), Score(changes(2, 6, 400), effect=2.0)
    assert dependent.n == 200
    assert dependent.limits(0.95)[0] < independent.limits(0.95)[0]


@pytest.mark.parametrize("n", [1, 10, 200])
def test_uncorrected_interval_without_any_change(n: int) -> None:
    """Closed form: +-z^2 / (n + z^2)."""
    width = QUANTILE**2 / (n + QUANTILE**2)
    assert Score([0] * n, corrected=False).limits(0.95) == pytest.approx((-width, width), abs=1e-6)

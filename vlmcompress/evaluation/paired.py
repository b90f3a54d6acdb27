"""Statistics of paired samples that share images and so aren't independent: their variance, and an exact test.

- **Design effect**: the variance of the mean difference with images as clusters, over that with independent samples. `score`
  divides the number of samples by it (Kish's effective sample size).
- **Test**: under the null hypothesis the two models could be swapped on any image, so the sign of each image's difference is
  a fair coin. The p-value is exact, by enumeration of the sum's distribution. With one question an image this is the exact
  McNemar test.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

PRIOR = 6.0  # pairs of questions, see `design_effect`


def design_effect(differences: Sequence[float], clusters: Iterable[Hashable]) -> float:
    """Variance of the mean of `differences` with dependence inside clusters, divided by the variance without it.

    It is 1 + rho (sum m^2 / n - 1) for clusters of m (Kish, Survey Sampling, 1965, section 8.2), rho being the
    correlation of two differences in a cluster, kept between 0 and 1. The estimate of rho takes in PRIOR pairs of
    questions that changed together: with few differing answers there's little to estimate it from, and too small a
    value would pass candidates that must not pass. With dozens of them the prior no longer matters.
    """
    d = np.asarray(differences, dtype=float)
    _, index, sizes = np.unique(_codes(clusters), return_inverse=True, return_counts=True)
    mates = sizes[index] - 1
    residuals = d - d.mean()
    together = float((np.bincount(index, residuals) ** 2).sum() - (residuals**2).sum())
    alone = float((residuals**2 * mates).sum())
    unit = float((d**2).sum() / max(np.count_nonzero(d), 1)) or 1.0
    rho = min(max((together + PRIOR * unit) / (alone + PRIOR * unit), 0.0), 1.0)
    return float(1 + rho * ((sizes**2).sum() / len(d) - 1))


def _codes(clusters: Iterable[Hashable]) -> list[int]:
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(cluster, len(seen)) for cluster in clusters]


def sums(differences: Sequence[float], clusters: Iterable[Hashable]) -> list[float]:
    """Sum of the differences of each cluster."""
    index = _codes(clusters)
    return np.bincount(index, np.asarray(differences, dtype=float)).tolist()


def monte_carlo_p(sums: Sequence[float], seed: int = 0, draws: int = 20_000) -> float:
    """P-value of `sign_flip_p` for sums that are not whole numbers, from random signs; never zero."""
    magnitudes = np.abs(np.asarray([s for s in sums if abs(s) > 1e-12]))
    observed = abs(math.fsum(sums)) - 1e-9
    rng, extreme, step = np.random.default_rng(seed), 0, max(1, 2_000_000 // max(len(magnitudes), 1))
    for start in range(0, draws, step):
        count = min(step, draws - start)
        signs = 2.0 * rng.integers(0, 2, (count, len(magnitudes)), dtype=np.int8) - 1.0
        extreme += int((np.abs(signs @ magnitudes) >= observed).sum())
    return (extreme + 1) / (draws + 1)


def sign_flip_p(sums: Iterable[int]) -> float:
    """The exact p-value P(|S| >= |observed|), where S adds up |sums| with fair random signs."""
    signed = [s for s in sums if s]
    magnitudes, observed = [abs(s) for s in signed], abs(sum(signed))
    ways = {0: 1}  # value of the sum so far -> number of sign choices
    for magnitude in magnitudes:
        following: dict[int, int] = {}
        for value, count in ways.items():
            following[value + magnitude] = following.get(value + magnitude, 0) + count
            following[value - magnitude] = following.get(value - magnitude, 0) + count
        ways = following
    extreme = sum(count for value, count in ways.items() if abs(value) >= observed)
    return extreme / 2 ** len(magnitudes)

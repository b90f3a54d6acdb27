"""Two models, the same questions: the difference of their accuracies, with an interval and a test.

Of n pairs, b are right only in the candidate and c only in the baseline; d = (b - c) / n.

- **Interval**: the score interval of Tango (Statist. Med. 17, 1998, 891-908) for a difference of paired proportions. Its
  limits are the D with (b - c - n D) / sqrt(n (2 q + D (1 - D))) = +-z, q being the maximum-likelihood estimate of c/n
  under D. It holds its level at small n and has a sensible width with no discordant pair at all, (-z^2/(n + z^2),
  +z^2/(n + z^2)), where a bootstrap or a Wald interval has none.
- **Questions about one image are not independent.** The design effect is the variance of d with images as clusters over
  its variance with independent questions. The interval is computed with b, c and n divided by it (Kish's effective sample
  size).
- **Test**: under the null hypothesis the two models could be swapped on any image, so the sign of each image's
  difference is a fair coin. The p-value is exact, by enumeration of the sum's distribution. With one question an image
  this is the exact McNemar test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

PRIOR = 2.0  # pairs of questions, see `design_effect`


@dataclass(frozen=True)
class Paired:
    """Baseline and candidate on the same n questions about `clusters` images.

    Attributes:
        both, baseline_only, candidate_only, neither: counts of questions by who was right.
        difference: candidate's accuracy minus baseline's.
        low, high: limits of the confidence interval of the difference.
        p: exact two-sided p-value of no difference.
        design_effect: by how much questions that share an image widen the variance.
    """

    n: int
    clusters: int
    both: int
    baseline_only: int
    candidate_only: int
    neither: int
    baseline_accuracy: float
    candidate_accuracy: float
    difference: float
    low: float
    high: float
    level: float
    p: float
    design_effect: float


def compare(
    baseline: Sequence[bool],
    candidate: Sequence[bool],
    clusters: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> Paired:
    """Compare right/wrong of two models, question by question.

    Args:
        baseline, candidate: whether each model was right, in the same order.
        clusters: what each question is about (its image); None: every question stands alone.
    """
    n = len(baseline)
    if n == 0 or len(candidate) != n or (clusters is not None and len(clusters) != n):
        raise ValueError("need the same, positive number of results of both models")
    clusters = range(n) if clusters is None else clusters
    counts = Counter(zip(map(bool, baseline), map(bool, candidate), strict=True))
    gained, lost = counts[False, True], counts[True, False]
    differences = [int(c) - int(b) for b, c in zip(baseline, candidate, strict=True)]
    changes = [round(change) for change in sums(differences, clusters)]
    effect = design_effect(differences, clusters)
    low, high = tango(gained / effect, lost / effect, n / effect, level)
    return Paired(
        n=n,
        clusters=len(changes),
        both=counts[True, True],
        baseline_only=lost,
        candidate_only=gained,
        neither=counts[False, False],
        baseline_accuracy=(counts[True, True] + lost) / n,
        candidate_accuracy=(counts[True, True] + gained) / n,
        difference=(gained - lost) / n,
        low=low,
        high=high,
        level=level,
        p=sign_flip_p(changes),
        design_effect=effect,
    )


def tango(b: float, c: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Tango's score interval of (b - c) / n; the counts may be effective ones, not whole."""
    z = NormalDist().inv_cdf(0.5 + level / 2)

    def score(delta: float) -> float:
        """Falls from +inf to -inf as delta goes from -1 to 1."""
        half = (2 * n - b + c) * delta - b - c
        q = (math.sqrt(max(half**2 + 8 * n * c * delta * (1 - delta), 0.0)) - half) / (4 * n)
        variance = n * (2 * q + delta * (1 - delta))
        gap = b - c - n * delta
        return gap / math.sqrt(variance) if variance > 1e-12 else math.copysign(math.inf, gap) if gap else 0.0

    def limit(target: float, left: float, right: float) -> float:
        for _ in range(60):
            middle = (left + right) / 2
            left, right = (middle, right) if score(middle) > target else (left, middle)
        return (left + right) / 2

    estimate = (b - c) / n
    return limit(z, -1.0, estimate), limit(-z, estimate, 1.0)


def design_effect(differences: Sequence[float], clusters: Iterable[Hashable]) -> float:
    """Variance of the mean of `differences` with dependence inside clusters, over that without.

    It is 1 + rho (sum m^2 / n - 1) for clusters of m (Kish, Survey Sampling, 1965, section 8.2), rho being the correlation
    of two differences in a cluster, kept between 0 and 1. As if PRIOR pairs of questions had been seen that changed
    together: with few differing answers there's little to estimate rho from, and too small a value would pass candidates
    that it must not. With dozens of them the prior no longer matters.
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
    """`sign_flip_p` for sums that are not whole numbers, from random signs; never zero."""
    magnitudes = np.abs(np.asarray([s for s in sums if abs(s) > 1e-12]))
    observed = abs(math.fsum(sums)) - 1e-9
    rng, extreme, step = np.random.default_rng(seed), 0, max(1, 2_000_000 // max(len(magnitudes), 1))
    for start in range(0, draws, step):
        count = min(step, draws - start)
        signs = 2.0 * rng.integers(0, 2, (count, len(magnitudes)), dtype=np.int8) - 1.0
        extreme += int((np.abs(signs @ magnitudes) >= observed).sum())
    return (extreme + 1) / (draws + 1)


def sign_flip_p(sums: Iterable[int]) -> float:
    """P(|S| >= |observed|) where S adds up |sums| with fair random signs; exact."""
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

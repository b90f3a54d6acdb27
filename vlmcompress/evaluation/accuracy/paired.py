"""Confidence bounds and tests of a mean paired difference, clustered by image.

Image i has m_i questions, whose differences (candidate minus baseline, in [-1, 1]) sum to S_i; the mean difference is
sum S_i / sum m_i = S / n. Questions about one image may be lost together, so the images are the independent observations.

**Bounds.** The p-value of "the true mean is at most D" is Gaffke's (Math. Methods Statist. 14, 2005, 451-467;
Learned-Miller and Thomas, arXiv:1905.06208), with one further image that loses all of its questions:

    P(sum_i E_i (S_i + t_i) - E_0 L <= 0),   E_i independent standard exponentials,   sum_i t_i = -D n

The t_i distribute the loss that the hypothesis allows over the images, and L is the number of questions of the further image.
With m questions per image there is only one way: t_i = -D m and L = (1 + D) m. With different numbers, losses may depend on
size: a model may fail on the few documents that have most of the questions. The loss that the hypothesis allows beyond the
observed mean x is then assigned to the largest images, down to a common level L (water filling):

    t_i = max(m_i (1 + x) - L, 0) - x m_i                 with L such that sum_i t_i = -D n

For an x chosen beforehand S_i + t_i + L is never negative and has the mean L under the hypothesis, so that the product of
the (S_i + t_i + L) / L is at most 1 on average, whatever each image's chances are (inequality of means), and its inverse a
p-value as well; Gaffke's is smaller. This conditions on the images' sizes: it is a promise about this test set. The promise
here is about *images drawn like these*, where the number of large ones is chance as well. Then the images' S_i - D m_i are
independent with mean 0, at least -(1 + D) m for images of at most m questions, and the p-value is the larger of the one above
and that with t_i = -D m_i and L = (1 + D) max m_i. It takes the largest image of the test set for the largest that is drawn: a
kind of image that the test set happens to lack altogether is beyond any test.

- **No correlation has to be estimated.** If questions of an image change together, the sums S_i are large. If none
  changed, the further image bounds unobserved losses: after k images without a change, the share of images that lose all
  is at most 1 - 0.025^(1/k), about 3.7 / k. No test with this error does better: with a larger share, k images without a
  loss would occur too often, however many questions each has. One document with a tenth of all questions could lose
  them with a probability of 97.5% and yet be observed to keep them: 9.75 points are not ruled out.
- **One lost answer less never makes the p-value larger**, as it only raises an S_i.
- **Special cases**, one question an image: without a win it is the exact binomial test (Clopper and Pearson, 1934), at
  D = 0 the exact McNemar test.

That the error is at most the level is proven for two outcomes and a conjecture otherwise; docs/results.md counts 2,000
simulated evaluations of each of 69 kinds, also where losses go with size. The bootstrap has no width when no answer
differs, and too little when few do.

**Tests of no difference** flip the signs of the images' sums S_i, as the two models could be swapped on any image: exact by
enumeration for right/wrong scores (with one question an image the exact McNemar test), else by random draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

NORMAL = NormalDist()
# Trapezoidal rule of `below_zero`: step and number of nodes, and the bend of its hyperbola. Relative errors are below 1e-9.
_STEP, _NODES, _BEND = 0.1, 121, 0.5
_SINH, _COSH = np.sinh(_STEP * np.arange(_NODES)), np.cosh(_STEP * np.arange(_NODES))
_EXACT = 1e-10  # error of limits


def sums_by_image(
    differences: Sequence[float] | NDArray[np.float64], images: Iterable[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum S_i of the differences of each image, and its number of questions m_i, in order of first appearance."""
    codes: dict[Hashable, int] = {}
    index = [codes.setdefault(image, len(codes)) for image in images]
    return np.bincount(index, np.asarray(differences, dtype=float)).astype(float), np.bincount(index).astype(float)


class MeanDifference:
    """Mean of paired differences in [-1, 1], clustered by image: p-values, confidence limits and design effect.

    Attributes:
        n: number of questions.
        mean: their mean difference.
        images: Kish's effective number of images.
        size: typical size of an image's mean difference that is not zero; 1 if all are zero.
        design_effect: variance of the mean with images as clusters, over that of as many questions about different images,
            both with the further image that loses everything; at least 1.
    """

    def __init__(self, differences: Sequence[float], images: Iterable[Hashable] | None = None) -> None:
        values = np.asarray(differences, dtype=float)
        sums, sizes = sums_by_image(values, range(len(values)) if images is None else images)
        self.n = len(values)
        self.mean = float(values.mean())
        # Kish (Survey Sampling, 1965): unequal clusters count as n / M of equal ones, with M = sum m_i^2 / sum m_i.
        self._image_size = float((sizes**2).sum() / self.n)  # M
        self.images = self.n / self._image_size
        (self._sums, self._sizes), counts = np.unique(np.stack([sums, sizes]), axis=1, return_counts=True)
        self._counts = counts.astype(np.float64)
        # Variance of a ratio estimator with images as clusters, sum_i (S_i - x m_i)^2 / (n M); deff is its ratio to the
        # variance of n independent questions. The added terms are the further image's: one of M questions, or M of one each.
        between_images = float(((sums - self.mean * sizes) ** 2).sum())
        between_questions = float(((values - self.mean) ** 2).sum())
        self._variance = between_images / (self.n * self._image_size)
        self.design_effect = max((between_images + self._image_size**2) / (between_questions + self._image_size), 1.0)
        absolute = float(np.abs(sums).sum())
        self.size = float((sums**2).sum()) / (self._image_size * absolute) if absolute else 1.0

    def variance(self, mean: float | None = None) -> float:
        """Variance of an image's mean difference; that of the overall mean is `images` times smaller.

        Args:
            mean: the true mean, below the observed one because more images lose everything; None: the observed one.
        """
        if mean is None or mean >= self.mean:
            return self._variance
        # share of images that lose everything, in a mixture with the observed ones
        lost = (self.mean - mean) / (1 + self.mean)
        # Law of total variance: spread within the two parts, and of their means around `mean`.
        return (1 - lost) * (self._variance + (self.mean - mean) ** 2) + lost * (1 + mean) ** 2

    def p_at_most(self, mean: float, times: float = 1.0) -> float:
        """One-sided p-value of "the true mean is at most `mean`". `times`: as if every image had been observed that often."""
        return gaffke_p(self._sums, self._sizes, times * self._counts, mean)

    def p_at_least(self, mean: float, times: float = 1.0) -> float:
        """One-sided p-value of "the true mean is at least `mean`"."""
        return gaffke_p(-self._sums, self._sizes, times * self._counts, -mean)

    def p_of_drop(self, drop: float, deviate: float) -> float:
        """The expected p-value of "nothing was lost" if the share `drop` of the images, of every size, loses everything.

        Other images change as often as the observed ones beyond their drift, equally often for the better and for the worse.

        Args:
            deviate: normal deviate below the mean at which the number of lost images is taken.
        """
        second = self._variance + self.mean**2
        # Changes of size s at a rate r with mean drift d have r s^2 = second moment; |d| s of it is the drift's own.
        fair = max(second - abs(self.mean) * self.size, 0.0) / second if second else 0.0
        spread = math.sqrt((1 - drop) * (fair * second + drop) / self.images)
        lost = max(drop - deviate * spread, 0.0)
        rest = (1 - lost) * self._counts
        sums = np.concatenate([-self._sizes, self._sums, -self._sums, 0 * self._sums])
        counts = np.concatenate([lost * self._counts, fair / 2 * rest, fair / 2 * rest, (1 - fair) * rest])
        return gaffke_p(-sums, np.tile(self._sizes, 4), counts, 0.0)

    def limits(self, level: float) -> tuple[float, float]:
        """The two-sided confidence interval of the mean; each limit has the error (1 - level) / 2."""
        tail = (1 - level) / 2
        # width of a bracket that mostly holds the limit
        width = 4 * math.sqrt(self._variance / self.images) + 5 * self._sizes.max() / self.n
        return _root(self.p_at_most, self.mean, width, -1.0, tail), _root(self.p_at_least, self.mean, width, 1.0, tail)


def gaffke_p(sums: NDArray[np.float64], sizes: NDArray[np.float64], counts: NDArray[np.float64], limit: float) -> float:
    """P-value of "the true mean is at most `limit`"; see the module.

    Args:
        sums, sizes: S_i and m_i of kinds of images; `counts`: number of each kind, above 0 and not necessarily whole.
    """
    n = float(counts @ sizes)
    observed = max(float(counts @ sums) / n, limit)
    room = (1 + observed) * sizes  # what an image may lose beyond the observed mean
    level = water_level(room, counts, (observed - limit) * n)
    # Images drawn like these: each may lose as many answers more as the largest has.
    allowed = [(-limit * sizes, (1 + limit) * sizes.max())]
    if sizes.min() < sizes.max():
        # Images of just these sizes: losses go to the largest.
        allowed.append((np.maximum(room - level, 0) - observed * sizes, level))
    # Gamma(k) is the sum of k exponentials, so `counts` images of one kind are one variable, and counts need not be whole.
    shapes = np.append(counts, 1.0)
    return max(below_zero(np.append(sums + t, -further), shapes) for t, further in allowed)


def water_level(heights: NDArray[np.float64], counts: NDArray[np.float64] | NDArray[np.int64], volume: float) -> float:
    """The level L above which the heights have this volume: sum_i counts_i max(heights_i - L, 0) = volume; a large volume
    gives a level below all heights."""
    order = np.argsort(-heights)
    number, total = np.cumsum(counts[order]), np.cumsum((counts * heights)[order])
    levels = (total - volume) / number  # L if exactly the first k heights are above it
    following = np.append(heights[order][1:], -np.inf)
    return float(levels[np.argmax(levels >= following)])


def below_zero(scales: NDArray[np.float64], shapes: NDArray[np.float64]) -> float:
    """P(sum_j a_j G_j <= 0) of independent gamma variables G_j of the given shapes and scale 1.

    The inverse Laplace transform along a hyperbola through the integrand's saddle point, by the trapezoidal rule, which
    converges exponentially (Rice, SIAM J. Sci. Stat. Comput. 1, 1980, for quadratic forms; Weideman and Trefethen, Math. Comp.
    76, 2007, for hyperbolas).

    Args:
        scales, shapes: a_j of any sign, shapes above 0.
    """
    a, w = scales[scales != 0], shapes[scales != 0]
    if not len(a) or a.max() <= 0:
        return 1.0
    if a.min() >= 0:
        return 0.0
    # For a mean below zero, the complement has its saddle point on the side without cancellation in the sum below.
    if float(w @ a) < 0:
        return 1.0 - below_zero(-a, w)
    # The integrand exp(K(s)) / -s, with K(s) = -sum w log(1 - a s), is convex between these two.
    low, high = 1 / float(a.min()), 0.0
    for _ in range(30):
        saddle = (low + high) / 2
        low, high = (low, saddle) if w @ (a / (1 - a * saddle)) > 1 / saddle else (saddle, high)
    # Curvature of the exponent at the saddle: the step is in units of the integrand's own width.
    width = 1 / math.sqrt(w @ (a / (1 - a * saddle)) ** 2 + 1 / saddle**2)

    def integrand(bend: float, step: int = 1) -> NDArray[np.complex128]:
        s = saddle + width * (1j * _SINH[::step] + bend * (_COSH[::step] - 1))
        slope = width * (1j * _COSH[::step] + bend * _SINH[::step])
        return np.exp(-(w @ np.log(1 - np.multiply.outer(a, s))) - np.log(-s)) * slope

    # All singularities are on the real axis, so the hyperbola may bend to either side; on the wrong side the integrand grows,
    # with cancellation.
    with np.errstate(over="ignore", invalid="ignore"):
        left, right = (np.nan_to_num(np.abs(integrand(bend, 5)), nan=np.inf).sum() for bend in (-_BEND, _BEND))
    values = integrand(_BEND if right < left else -_BEND).imag
    return min(max(float(_STEP * (values.sum() - values[0] / 2) / math.pi), 0.0), 1.0)


def _root(p_value: Callable[[float], float], inner: float, width: float, end: float, tail: float) -> float:
    """The mean between `inner` and `end` at which a p-value falls to `tail`; searched first within `width` of `inner`."""

    def deviate(mean: float) -> float:
        return NORMAL.inv_cdf(min(max(p_value(mean), 1e-300), 1 - 1e-15)) - NORMAL.inv_cdf(tail)

    outer = end * min(end * inner + width, 1.0)
    if (at_outer := deviate(outer)) > 0:
        outer, at_outer = end, deviate(end)
    if at_outer >= 0 or deviate(inner) <= 0:
        return outer if at_outer >= 0 else inner
    from scipy.optimize import brentq  # a part of the extra `eval`; this file is imported without it

    # Brent's method: the bracket has one sign change, as Gaffke's p-value rises with the mean.
    # Normal deviates are nearly linear in the mean, so few evaluations suffice.
    return float(brentq(deviate, inner, outer, xtol=_EXACT))


def sign_flip_p(sums: Iterable[int]) -> float:
    """Exact p-value P(|S| >= |observed|), where S adds up the images' |sums| with fair random signs."""
    signed = [s for s in sums if s]
    observed = abs(sum(signed))
    counts = {0: 1}  # partial sum -> number of sign choices that give it
    # Dynamic programming over the distinct sums: exact, in as many steps as images times distinct totals.
    for magnitude in map(abs, signed):
        extended: dict[int, int] = {}
        for total, count in counts.items():
            extended[total + magnitude] = extended.get(total + magnitude, 0) + count
            extended[total - magnitude] = extended.get(total - magnitude, 0) + count
        counts = extended
    extreme = sum(count for total, count in counts.items() if abs(total) >= observed)
    return extreme / 2 ** len(signed)


def monte_carlo_p(sums: Sequence[float], seed: int = 0, draws: int = 20_000) -> float:
    """Monte Carlo estimate of the p-value of `sign_flip_p`, for sums that are not whole numbers; never zero."""
    magnitudes = np.abs(np.asarray([s for s in sums if abs(s) > 1e-12]))
    observed = abs(math.fsum(sums)) - 1e-9
    rng, extreme, step = np.random.default_rng(seed), 0, max(1, 2_000_000 // max(len(magnitudes), 1))
    for start in range(0, draws, step):
        count = min(step, draws - start)
        signs = 2.0 * rng.integers(0, 2, (count, len(magnitudes)), dtype=np.int8) - 1.0
        extreme += int((np.abs(signs @ magnitudes) >= observed).sum())
    return (extreme + 1) / (draws + 1)  # the observed signs are a draw, too (Phipson and Smyth, SAGMB 9, 2010)

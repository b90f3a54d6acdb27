"""The posterior of a candidate's accuracy after some questions, and the expected value of continuing with it.

A candidate's *difference* is its accuracy minus the original's; a loss is negative. A few questions determine it poorly. The
divergence of the first token (KL of the original's distribution from the candidate's) is more informative, as losses grow with
it. So each difference is modelled as minus the divergence times a slope, and slopes vary between candidates around a common
one:

    d_c = -a_c k_c,   a_c ~ N(a, sigma^2),   observed x_c ~ N(d_c, v_c) and K_c ~ N(k_c, u_c)

a and sigma come from all candidates (weighted least squares; sigma by the method of moments, DerSimonian and Laird, Controlled
Clinical Trials 7, 1986): empirical Bayes. v_c is the variance of the mean if images that lose everything made the loss the
margin (`accuracy.paired`), so that a candidate that lost none of 40 questions is not considered perfect. u_c is large: most of
a mean divergence comes from the few questions whose answers change, each with a few nats, so that it is no more precise than a
count of these (`_NATS`).

The value of a candidate is its gain times the chance that a test on separate data will confirm it, and the original's gain of 1
otherwise. That chance, with the posterior's variance in it, is the test's *assurance* (O'Hagan, Stevens and Campbell,
Pharmaceutical Statistics 4, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vlmcompress.evaluation.accuracy import noninferiority
from vlmcompress.evaluation.accuracy.paired import NORMAL, MeanDifference

ERROR = 0.025
"""One-sided error of every verdict, as in `vlmcompress eval`."""
_LEAST = 1e-6  # variance of a difference that no divergence shows: a tenth of a point
_NATS = 4.0  # mean squared divergence of a question over its mean: about 3 nats by the tails in eval/accuracy.json
_UNSEEN = 0.2  # nats that too few questions may have missed


@dataclass(frozen=True)
class Posterior:
    """Mean and variance of a difference in accuracy."""

    mean: float
    variance: float

    def __add__(self, other: Posterior) -> Posterior:
        """The posterior of two changes at once: differences add up."""
        return Posterior(self.mean + other.mean, self.variance + other.variance)


@dataclass(frozen=True)
class Evidence:
    """A candidate's answers: paired differences, their images, and the mean divergence or None."""

    differences: Sequence[float]
    images: Sequence[Hashable]
    divergence: float | None

    @cached_property
    def mean(self) -> MeanDifference:
        """The mean of the differences, to be tested."""
        return MeanDifference(self.differences, self.images)


def posteriors(evidence: Mapping[str, Evidence], margin: float) -> dict[str, Posterior]:
    """The posterior of each candidate, from its own answers and, through the divergence, from those of all."""
    observed = {name: _observed(answers, margin) for name, answers in evidence.items()}
    divergences = {name: answers.divergence for name, answers in evidence.items() if answers.divergence is not None}
    slope, spread, doubt = _slope([(k, *observed[name]) for name, k in divergences.items() if k > 0])
    posterior_of = {}
    for name, (mean, variance) in observed.items():
        if name not in divergences or math.isinf(spread):
            posterior_of[name] = Posterior(mean, variance)
            continue
        # Normal prior -a k with the variances of a_c, of a itself and of k; share is the weight of the candidate's own answers.
        k, n = divergences[name], evidence[name].mean.images
        before = k**2 * (spread + doubt) + slope**2 * _NATS * (k + _UNSEEN / n) / n + _LEAST
        share = before / (before + variance)
        posterior_of[name] = Posterior(share * mean - (1 - share) * slope * k, share * variance)
    return posterior_of


def _observed(evidence: Evidence, margin: float) -> tuple[float, float]:
    """Mean and variance of a mean difference."""
    mean = evidence.mean
    return mean.mean, mean.variance(-margin) / mean.images


def _slope(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Fit the common slope to (divergence, difference, variance) of candidates: slope, sigma^2, variance of the slope.

    With fewer than three candidates sigma^2 is infinite.
    """
    if len(rows) < 3:
        return 0.0, math.inf, 0.0
    slopes = [(-x / k, v / k**2) for k, x, v in rows]  # each one's slope, and its variance
    spread, slope, weight = 0.0, 0.0, 0.0
    for _ in range(2):
        weights = [1 / (v + spread) for _, v in slopes]
        weight = math.fsum(weights)
        slope = max(math.fsum(w * a for w, (a, _) in zip(weights, slopes, strict=True)) / weight, 0.0)
        if spread:
            break
        q = math.fsum(w * (a - slope) ** 2 for w, (a, _) in zip(weights, slopes, strict=True))
        # DerSimonian and Laird's estimate: tau^2 = (Q - (m - 1)) / (sum w - sum w^2 / sum w), Q by weights without tau.
        scale = weight - math.fsum(w * w for w in weights) / weight
        moments = (q - (len(slopes) - 1)) / scale if scale > 1e-9 * weight else 0.0  # where one outweighs all others
        spread = max(moments, (slope / 3) ** 2, 1e-9)  # those measured well were 0.2 to 0.46
    return slope, spread, 1 / weight


def assurance(posterior: Posterior, margin: float, images: float | None, variance: float) -> float:
    """The chance that a test on `images` will confirm a loss of at most `margin`.

    Args:
        images: their effective number; None: no test follows, and the result is the chance that the loss is at most `margin`.
        variance: variance of an image's mean difference.
    """
    gap, unsure = posterior.mean + margin, posterior.variance
    if images is not None:
        noise = variance / images
        # The test passes if its estimate exceeds -margin by z standard errors; over the posterior that has this normal chance.
        gap -= NORMAL.inv_cdf(1 - ERROR) * math.sqrt(noise)
        unsure += noise
    return NORMAL.cdf(gap / math.sqrt(max(unsure, 1e-12)))


def expected_gain(gain: float, chance: float) -> float:
    """A candidate's expected gain: `gain` (relative to the original) if it is confirmed, else 1."""
    return 1 + (gain - 1) * chance


def refuted(evidence: Evidence, margin: float, looks: int) -> bool:
    """Whether a loss of at most `margin` is refuted.

    A candidate is tested up to `looks` times, each time with an error of 0.025 / looks (Bonferroni), so that one within the
    floor is rejected with a probability of at most 0.025 overall.
    """
    return evidence.mean.mean < -margin and noninferiority.p_within(evidence.mean, margin) < ERROR / looks

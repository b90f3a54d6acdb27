"""Test whether the candidate is at most `margin` worse: pass, fail, or how many samples would tell.

Two one-sided tests, each with error (1 - level) / 2 (2.5% at 0.95, as ICH E9 asks of non-inferiority trials):

- **pass**: a loss of `margin` or more is refuted, so the interval's lower limit is above -margin. Wrong with at most 2.5%.
- **fail**: a loss of `margin` or less is refuted, so its upper limit is below -margin. Wrong with at most 2.5%.
- **inconclusive** otherwise. A drop can be significant and yet inconclusive: it's there, but perhaps within the margin.

Sample sizes follow the normal approximation with the variance under the hypothesis and under the assumed truth (Nam,
Biometrics 53, 1997, 1422-1430, for right/wrong scores), the continuity and skewness corrections of `score` included.
"""

from __future__ import annotations

import math

from vlmcompress.evaluation.score import NORMAL, Score
from vlmcompress.results import Verdict

POWER = 0.8


def verdict(score: Score, margin: float, level: float) -> Verdict:
    """The verdict of the two one-sided tests: pass, fail or inconclusive."""
    quantile, z = NORMAL.inv_cdf(0.5 + level / 2), score.z(-margin)
    return "pass" if z > quantile else "fail" if z < -quantile else "inconclusive"


def p_within(score: Score, margin: float) -> float:
    """One-sided p-value of "the loss is at most `margin`"; small means that the candidate fails."""
    return NORMAL.cdf(score.z(-margin))


def detectable(score: Score, level: float, power: float = POWER) -> float:
    """The smallest true drop that as many samples like these would show (upper limit below 0) with probability `power`.

    Answers are assumed to change in both directions as often as observed and once more, as few changes tell little of their
    rate, and the drop to come on top of that.
    """
    alpha, beta = NORMAL.inv_cdf(0.5 + level / 2), NORMAL.inv_cdf(power)
    both_ways = max(score.variance + score.mean**2 - abs(score.mean) * score.size, 0.0) + score.size**2 / score.n

    def shown(drop: float) -> bool:
        spread = both_ways + drop * score.size
        signal = drop * score.n - score.continuity
        return signal >= math.sqrt(score.n) * (alpha * math.sqrt(spread) + beta * math.sqrt(max(spread - drop**2, 0.0)))

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if shown(middle) else (middle, high)
    return high


def needed(score: Score, margin: float, level: float, effect: float, power: float = POWER) -> int | None:
    """Number of samples that reach a verdict with probability `power`, if the true difference is the observed one.

    None if the observed difference is right at the margin, where no number of samples decides.
    """
    gap = score.mean + margin
    if abs(gap) < 1e-6:
        return None
    alpha, beta = NORMAL.inv_cdf(0.5 + level / 2), NORMAL.inv_cdf(power)
    variance, third = score.moments(-margin)
    noise = alpha * math.sqrt(variance) + beta * math.sqrt(score.variance)
    skewness = third / (6 * variance) * (alpha**2 - 1)
    offset = score.continuity + math.copysign(1.0, gap) * skewness
    # |gap| n - noise sqrt(n) - offset = 0
    root = (noise + math.sqrt(max(noise**2 + 4 * abs(gap) * offset, 0.0))) / (2 * abs(gap))
    return math.ceil(root**2 * effect)

"""Non-inferiority test: is the candidate at most `margin` worse? Pass, fail, or the number of samples that would decide.

Two one-sided tests, each with error (1 - level) / 2 (2.5% at 0.95, as ICH E9 requires of non-inferiority trials):

- **pass**: a loss of `margin` or more is refuted, so the interval's lower limit is above -margin. Wrong with at most 2.5%.
- **fail**: a loss of `margin` or less is refuted, so its upper limit is below -margin. Wrong with at most 2.5%.
- **inconclusive** otherwise. A drop can be significant and yet inconclusive: it's there, but perhaps within the margin.

Verdicts are monotone: with the bounds of `paired`, a smaller loss never gets a worse verdict.

Only right answers of the baseline can be lost. So a pass is valid only if the evaluation could have failed (ICH E10's assay
sensitivity): a candidate that loses all right answers of the baseline must fail, else `sensitive` is False and a pass is void.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from vlmcompress.evaluation.accuracy.paired import NORMAL, MeanDifference
from vlmcompress.evaluation.results import Verdict

POWER = 0.8
_MOST = 1e6  # largest multiple of the samples that `samples_needed` tries


def verdict(difference: MeanDifference, margin: float, level: float) -> Verdict:
    """Verdict of the two one-sided tests."""
    error = (1 - level) / 2
    if difference.mean > -margin:
        # p_within is at least 1/e here, as sums of exponentials are log-concave (Gruenbaum, 1960)
        return "pass" if difference.p_at_most(-margin) < error else "inconclusive"
    return "fail" if p_within(difference, margin) < error else "inconclusive"


def p_within(difference: MeanDifference, margin: float) -> float:
    """One-sided p-value of "the loss is at most `margin`"; small means that the candidate fails."""
    return difference.p_at_least(-margin)


def sensitive(baseline: Sequence[float], images: Iterable[Hashable], margin: float, level: float) -> bool:
    """Whether a candidate without right answers would fail, i.e. the baseline has enough of them for a loss to show.

    Args:
        baseline: its scores in 0 to 1.
    """
    return verdict(MeanDifference([-score for score in baseline], images), margin, level) == "fail"


def min_images_to_pass(margin: float, level: float) -> int:
    """The smallest number of images, with equally many questions each, with which a candidate that changes no answer passes;
    with fewer images no candidate can pass."""
    # Without changed answers the bound is Clopper and Pearson's for 0 of k: 1 - error^(1/k) < margin, solved for k.
    return math.floor(math.log((1 - level) / 2) / math.log1p(-margin)) + 1


def detectable(difference: MeanDifference, level: float, power: float = POWER) -> float:
    """The smallest true drop that as many samples like these would show (upper limit below 0) with probability `power`.

    The model of a drop: whole images of every size are lost, besides changes that are equally often for the better and for the
    worse; the number of lost images is taken at its quantile 1 - `power`, by the normal approximation.
    """
    error, deviate = (1 - level) / 2, NORMAL.inv_cdf(power)
    low, high = 0.0, 1.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if difference.p_of_drop(middle, deviate) < error else (middle, high)
    return high


def samples_needed(difference: MeanDifference, margin: float, level: float) -> int | None:
    """Number of samples, in images of the same sizes, that reach a verdict with probability `POWER` if the true difference is
    the observed one.

    The sample size is scaled until the test decides with the mean shifted against us by the `POWER` quantile of its error
    (Lachin, Controlled Clinical Trials 2, 1981). None if the observed difference is at the margin, where no number decides.
    """
    gap, error = difference.mean + margin, (1 - level) / 2
    if abs(gap) < 1e-6:
        return None
    # The mean of a new sample falls short of the true one by z_power standard errors in 1 - POWER of the cases.
    power_shift = NORMAL.inv_cdf(POWER) * math.sqrt(difference.variance() / difference.images)

    def decided(times: float) -> bool:
        off = power_shift / math.sqrt(times)
        if off >= abs(gap):
            return False
        if gap > 0:
            return difference.p_at_most(off - margin, times) < error
        return difference.p_at_least(-off - margin, times) < error

    # Decided is monotone in the number of samples: double until it is, then bisect.
    low, high = 0.0, 2.0
    while not decided(high):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return math.ceil(difference.n * high)

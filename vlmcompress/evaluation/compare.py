"""Compare paired scores of baseline and candidate: difference, interval, p-value, verdict, sample sizes.

    found = compare(before, after, images, margin=0.01)          # scores in 0 to 1, in the same order
    found.verdict, found.needed                                  # "inconclusive", 1840
    by_family = families({"chart": (before, after, images), ...}, margin=0.05)

- **Interval and verdict**: the bounds of `bounds`, whose observations are images, as questions about one may change
  together, and the two one-sided tests of `noninferiority`.
- **p** of no difference: signs of the images' sums are flipped; exact for right/wrong scores, else 20,000 random draws
  with a fixed seed. Without shared images the exact one is McNemar's test.
- **Families**: p-values are adjusted by Holm's method (Scand. J. Statist. 6, 1979). A family *fails* if its one-sided test
  still rejects after Holm's correction over all families, so that a harmless candidate fails in any family with at most
  2.5%. A family *passes* at its own, uncorrected level: to pass means that all families hold, and for such a conjunction
  the uncorrected level is the right one (intersection-union test; Berger, Technometrics 24, 1982, 295-300).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from vlmcompress.evaluation import noninferiority, paired
from vlmcompress.evaluation.bounds import MeanDifference
from vlmcompress.evaluation.questions import WITHOUT_FAMILY
from vlmcompress.results import Comparison, Scored

MARGIN = 0.01
LEVEL = 0.95
Pairs = tuple[Sequence[float], Sequence[float], Sequence[Hashable] | None]


def compare(
    baseline: Sequence[float],
    candidate: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    margin: float = MARGIN,
    level: float = LEVEL,
) -> Comparison:
    """Compare two models that answered the same questions.

    Args:
        baseline, candidate: scores in 0 to 1, in the same order.
        clusters: name of each question's image, or whatever else questions share; None: every question stands alone.
        margin: drop that is allowed, as a share: 0.01 is a point.
        level: level of the two-sided interval; each one-sided test has error (1 - level) / 2.

    Raises:
        ValueError: no scores, numbers of scores that differ, or a score, margin or level out of range.
    """
    return _compare((baseline, candidate, clusters), margin, level)[0]


def families(
    groups: Mapping[str, Pairs], *, margin: float | Mapping[str, float] = MARGIN, level: float = LEVEL
) -> dict[str, Comparison]:
    """Compare each family of (baseline, candidate, clusters), corrected for their number; see the module.

    A mapping of margins may leave families out; they get `MARGIN`.
    """
    margins = {name: margin if isinstance(margin, float | int) else margin.get(name, MARGIN) for name in groups}
    found = {name: _compare(pairs, margins[name], level) for name, pairs in groups.items()}
    adjusted = holm({name: one.p for name, (one, _) in found.items()})
    beyond = holm({name: p for name, (_, p) in found.items()})
    corrected = {}
    for name, (one, _) in found.items():
        verdict = one.verdict
        if verdict == "fail" and beyond[name] > (1 - level) / 2:
            verdict = "inconclusive"
        corrected[name] = one.model_copy(update={"adjusted_p": adjusted[name], "verdict": verdict})
    return corrected


def pairs(samples: Sequence[Scored]) -> Pairs:
    """Collect scores and images of samples, for `compare`. A sample without image stands alone."""
    images = [s.image or ("no image", s.id) for s in samples]
    return [s.baseline_score for s in samples], [s.candidate_score for s in samples], images


def by_family(samples: Sequence[Scored]) -> dict[str, Pairs]:
    """Collect scores and images of samples by family, for `families`; empty where the data name no family."""
    names = sorted({s.family for s in samples})
    if names == [WITHOUT_FAMILY]:
        return {}
    return {name: pairs([s for s in samples if s.family == name]) for name in names}


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Adjust p-values so that the chance of any error among all of them is at most the level (Holm's step-down method)."""
    adjusted, highest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(values) - rank)))
        adjusted[name] = highest
    return adjusted


def _compare(given: Pairs, margin: float, level: float) -> tuple[Comparison, float]:
    """Compute the comparison, and the one-sided p-value of a loss within the margin."""
    baseline, candidate, clusters = given
    clusters = _checked(given, margin, level)
    n, differences = len(baseline), [float(c) - float(b) for b, c in zip(baseline, candidate, strict=True)]
    difference = MeanDifference(differences, clusters)
    low, high = difference.limits(level)
    changes = paired.by_image(differences, clusters)[0].tolist()
    binary = {*map(float, baseline), *map(float, candidate)} <= {0.0, 1.0}
    counts = Counter(zip(map(bool, baseline), map(bool, candidate), strict=True)) if binary else {}
    verdict = noninferiority.verdict(difference, margin, level)
    comparison = Comparison(
        n=n,
        clusters=len(changes),
        baseline=math.fsum(baseline) / n,
        candidate=math.fsum(candidate) / n,
        difference=math.fsum(differences) / n,
        low=low,
        high=high,
        level=level,
        method="gaffke",
        p=paired.sign_flip_p([round(s) for s in changes]) if binary else paired.monte_carlo_p(changes),
        design_effect=difference.design_effect,
        both=counts.get((True, True), 0) if binary else None,
        baseline_only=counts.get((True, False), 0) if binary else None,
        candidate_only=counts.get((False, True), 0) if binary else None,
        neither=counts.get((False, False), 0) if binary else None,
        detectable=noninferiority.detectable(difference, level),
        margin=margin,
        verdict=verdict,
        needed=noninferiority.needed(difference, margin, level) if verdict == "inconclusive" else None,
    )
    return comparison, noninferiority.p_within(difference, margin)


def _checked(given: Pairs, margin: float, level: float) -> Sequence[Hashable]:
    """Check the arguments of `compare` and return the clusters."""
    baseline, candidate, clusters = given
    n = len(baseline)
    if n == 0 or len(candidate) != n or (clusters is not None and len(clusters) != n):
        raise ValueError("need the same, positive number of results of both models")
    if not all(0 <= value <= 1 for value in (*baseline, *candidate)):
        raise ValueError("scores must be in 0 to 1")
    if not 0 < margin < 1 or not 0 < level < 1:
        raise ValueError(f"margin {margin} and level {level} must be between 0 and 1")
    return range(n) if clusters is None else clusters

"""Compare the answers of baseline and candidate to the same questions: their scores, and their first tokens' distributions.

    comparison = compare(before, after, images, margin=0.01)     # scores in 0 to 1, in the same order
    comparison.verdict, comparison.needed                        # "inconclusive", 1840
    by_family = families({"chart": (before, after, images), ...}, margin=0.05)

- **Interval and verdict**: the bounds of `paired`, clustered by image, and the two one-sided tests of `noninferiority`. A pass
  counts only if the baseline has enough right answers for a loss to be detectable.
- **p** of no difference: signs of the images' sums are flipped; exact for right/wrong scores, else 20,000 random draws
  with a fixed seed. Without shared images the exact one is McNemar's test.
- **Families**: p-values are adjusted by Holm's method (Scand. J. Statist. 6, 1979). A family *fails* if its one-sided test
  still rejects after Holm's correction over all families, so that a harmless candidate fails in any family with at most
  2.5%. A family *passes* at its own, uncorrected level: to pass means that all families hold, and for such a conjunction
  the uncorrected level is the right one (intersection-union test; Berger, Technometrics 24, 1982, 295-300).
- **Divergence** of the first answer token's distribution shows a change in few samples. Engines report the k most likely
  tokens: those that both sides report are compared one by one, the rest of the vocabulary as one outcome. Merging outcomes
  can only lower a divergence (data processing inequality; Cover and Thomas, Elements of Information Theory, 2006, section
  2.8), so the value is a lower bound, close to the true one where k tokens hold nearly all probability.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from vlmcompress.evaluation.accuracy import noninferiority, paired
from vlmcompress.evaluation.results import Comparison, Divergence, Scored

MARGIN = 0.01
LEVEL = 0.95
WITHOUT_FAMILY = "other"  # family of samples whose data name none
Pairs = tuple[Sequence[float], Sequence[float], Sequence[Hashable] | None]  # scores of both sides, images
First = Mapping[str, float] | None  # first token -> natural log of its probability
FLOOR = 1e-9  # smallest probability of "all other tokens", given rounded logarithms


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
        clusters: identifier of each question's image, or of what questions share otherwise; None: all are independent.
        margin: allowed drop, as a share: 0.01 is a point.
        level: level of the two-sided interval; each one-sided test has error (1 - level) / 2.

    Raises:
        ValueError: no scores, different numbers of scores, or a score, margin or level out of range.
    """
    return _compare((baseline, candidate, clusters), margin, level)[0]


def families(
    groups: Mapping[str, Pairs], *, margin: float | Mapping[str, float] = MARGIN, level: float = LEVEL
) -> dict[str, Comparison]:
    """Compare families of (baseline, candidate, clusters), corrected for their number; see the module.

    Families without an entry in a mapping of margins get `MARGIN`.
    """
    margins = {name: margin if isinstance(margin, float | int) else margin.get(name, MARGIN) for name in groups}
    compared = {name: _compare(pairs, margins[name], level) for name, pairs in groups.items()}
    adjusted = holm({name: comparison.p for name, (comparison, _) in compared.items()})
    adjusted_within = holm({name: p_within for name, (_, p_within) in compared.items()})
    corrected = {}
    for name, (comparison, _) in compared.items():
        verdict = comparison.verdict
        if verdict == "fail" and adjusted_within[name] > (1 - level) / 2:
            verdict = "inconclusive"
        corrected[name] = comparison.model_copy(update={"adjusted_p": adjusted[name], "verdict": verdict})
    return corrected


def pairs(samples: Sequence[Scored]) -> Pairs:
    """Scores and images of samples, for `compare`. A sample without image is its own cluster."""
    images = [s.image or ("no image", s.id) for s in samples]
    return [s.baseline_score for s in samples], [s.candidate_score for s in samples], images


def by_family(samples: Sequence[Scored]) -> dict[str, Pairs]:
    """Scores and images of samples by family, for `families`; empty if the data have no families."""
    names = sorted({s.family for s in samples})
    if names == [WITHOUT_FAMILY]:
        return {}
    return {name: pairs([s for s in samples if s.family == name]) for name in names}


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """P-values adjusted by Holm's step-down method, which keeps the chance of any false rejection at the level."""
    adjusted, highest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(values) - rank)))  # (m - rank) p, made monotone
        adjusted[name] = highest
    return adjusted


def _compare(pairs: Pairs, margin: float, level: float) -> tuple[Comparison, float]:
    """The comparison, and the one-sided p-value of "the loss is within the margin"."""
    baseline, candidate, clusters = pairs
    n = len(baseline)
    if n == 0 or len(candidate) != n or (clusters is not None and len(clusters) != n):
        raise ValueError("need the same, positive number of results of both models")
    if not all(0 <= score <= 1 for score in (*baseline, *candidate)):
        raise ValueError("scores must be in 0 to 1")
    if not 0 < margin < 1 or not 0 < level < 1:
        raise ValueError(f"margin {margin} and level {level} must be between 0 and 1")
    images = list(range(n) if clusters is None else clusters)
    differences = [float(c) - float(b) for b, c in zip(baseline, candidate, strict=True)]
    difference = paired.MeanDifference(differences, images)
    low, high = difference.limits(level)
    sums = paired.sums_by_image(differences, images)[0].tolist()
    binary = {*map(float, baseline), *map(float, candidate)} <= {0.0, 1.0}
    counts = Counter(zip(map(bool, baseline), map(bool, candidate), strict=True)) if binary else {}
    verdict = noninferiority.verdict(difference, margin, level)
    # Assay sensitivity (ICH E10) is only needed for a pass.
    sensitive = verdict != "pass" or noninferiority.sensitive(baseline, images, margin, level)
    verdict = verdict if sensitive else "inconclusive"
    comparison = Comparison(
        n=n,
        clusters=len(sums),
        baseline=math.fsum(baseline) / n,
        candidate=math.fsum(candidate) / n,
        difference=math.fsum(differences) / n,
        low=low,
        high=high,
        level=level,
        method="gaffke",
        p=paired.sign_flip_p([round(s) for s in sums]) if binary else paired.monte_carlo_p(sums),
        design_effect=difference.design_effect,
        both=counts.get((True, True), 0) if binary else None,
        baseline_only=counts.get((True, False), 0) if binary else None,
        candidate_only=counts.get((False, True), 0) if binary else None,
        neither=counts.get((False, False), 0) if binary else None,
        detectable=noninferiority.detectable(difference, level),
        margin=margin,
        verdict=verdict,
        sensitive=sensitive,
        needed=noninferiority.samples_needed(difference, margin, level)
        if sensitive and verdict == "inconclusive"
        else None,
        largest=max(Counter(images).values()),
    )
    return comparison, noninferiority.p_within(difference, margin)


def changed_answers(samples: Iterable[Scored]) -> list[Scored]:
    """Samples with different answers: lost ones first, then gained, then those with the same score.

    Suites and families alternate, the largest change first, so that one weak family doesn't fill a report.
    """
    turns: Counter[tuple[int, str, str]] = Counter()
    ranked = []
    for sample in samples:
        if sample.baseline != sample.candidate:
            group = (sample.change, sample.suite, sample.family)
            size = abs(sample.candidate_score - sample.baseline_score)
            ranked.append(((sample.change, turns[group], -size, sample.suite, sample.family, sample.id), sample))
            turns[group] += 1
    return [sample for _, sample in sorted(ranked, key=lambda pair: pair[0])]


def first_token_divergence(
    baseline: Sequence[First], candidate: Sequence[First]
) -> tuple[Divergence | None, list[float | None]]:
    """KL(baseline || candidate) of the first tokens, in nats: its summary, and the value of each sample.

    A sample's value is None if a side reports no probabilities; the summary is None if all values are.
    """
    pairs = list(zip(baseline, candidate, strict=True))
    values = [kl(p, q) if p and q else None for p, q in pairs]
    reported = [value for value in values if value is not None]
    if not reported:
        return None, values
    same = [max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in pairs if p and q]
    summary = Divergence(
        n=len(reported),
        mean=math.fsum(reported) / len(reported),
        median=float(np.median(reported)),
        p95=float(np.quantile(reported, 0.95)),
        same_first=sum(same) / len(same),
    )
    return summary, values


def kl(baseline: Mapping[str, float], candidate: Mapping[str, float]) -> float:
    """A lower bound of KL(baseline || candidate) in nats; see the module."""
    common = sorted(baseline.keys() & candidate.keys())
    p, q = ([math.exp(side[token]) for token in common] for side in (baseline, candidate))
    # Tokens that only one side reports are merged into one outcome, with the probability that the common tokens leave.
    p, q = ([*side, max(1 - math.fsum(side), 0.0)] for side in (p, q))
    terms = [a * math.log(a / max(b, FLOOR)) for a, b in zip(p, q, strict=True) if a > FLOOR]
    return max(math.fsum(terms), 0.0)

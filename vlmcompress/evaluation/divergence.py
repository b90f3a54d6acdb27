"""Divergence of the first answer token's distribution: an early warning that shows in few samples.

Engines report the k most likely tokens. Tokens that both sides report are compared one by one, all others of the vocabulary
as one. Merging outcomes can only lower a divergence (data processing inequality; Cover and Thomas, Elements of Information
Theory, 2006, section 2.8), so the value is a lower bound of the true one, and close to it where k tokens hold nearly all
probability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vlmcompress.results import Divergence

First = Mapping[str, float] | None  # token -> natural log of its probability
FLOOR = 1e-9  # probability of "all other tokens" is known no better, from rounded logarithms


def divergence(baseline: Sequence[First], candidate: Sequence[First]) -> tuple[Divergence | None, list[float | None]]:
    """Compute KL(baseline || candidate) in nats: its summary, and the value of each sample.

    A sample of which one side reports nothing has None; the summary is None if all are so.
    """
    pairs = list(zip(baseline, candidate, strict=True))
    values = [kl(p, q) if p and q else None for p, q in pairs]
    known = [value for value in values if value is not None]
    if not known:
        return None, values
    same = [max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in pairs if p and q]
    summary = Divergence(
        n=len(known),
        mean=math.fsum(known) / len(known),
        median=float(np.median(known)),
        p95=float(np.quantile(known, 0.95)),
        same_first=sum(same) / len(same),
    )
    return summary, values


def kl(baseline: Mapping[str, float], candidate: Mapping[str, float]) -> float:
    """A lower bound of the divergence of `candidate` from `baseline`; see the module."""
    common = sorted(baseline.keys() & candidate.keys())
    p, q = ([math.exp(side[token]) for token in common] for side in (baseline, candidate))
    p, q = ([*side, max(1 - math.fsum(side), 0.0)] for side in (p, q))
    terms = [a * math.log(a / max(b, FLOOR)) for a, b in zip(p, q, strict=True) if a > FLOOR]
    return max(math.fsum(terms), 0.0)

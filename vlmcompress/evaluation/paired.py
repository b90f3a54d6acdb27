"""Paired samples that share images and so aren't independent: sums by image, and an exact test of no difference.

Under the null hypothesis the two models could be swapped on any image, so the sign of each image's difference is a fair
coin. The p-value is exact, by enumeration of the sum's distribution. With one question an image it is the exact McNemar
test.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def by_image(
    differences: Sequence[float] | NDArray[np.float64], images: Iterable[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum of the differences of each image, and its number of questions, in the order in which images come first."""
    codes: dict[Hashable, int] = {}
    index = [codes.setdefault(image, len(codes)) for image in images]
    return np.bincount(index, np.asarray(differences, dtype=float)).astype(float), np.bincount(index).astype(float)


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

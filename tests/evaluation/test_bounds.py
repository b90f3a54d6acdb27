"""The bounds of a mean against exact tests, enumeration, Monte Carlo and the promise that fewer losses are never worse."""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np
import pytest
from scipy.stats import beta, binom, multinomial

from vlmcompress.evaluation.compare import compare
from vlmcompress.evaluation.noninferiority import fewest, verdict
from vlmcompress.evaluation.paired import MeanDifference, below_zero

RANK = {"fail": 0, "inconclusive": 1, "pass": 2}


def changes(gained: int, lost: int, n: int) -> list[int]:
    return [1] * gained + [-1] * lost + [0] * (n - gained - lost)


@pytest.mark.parametrize("lost, n", [(0, 1), (0, 12), (0, 400), (3, 12), (15, 2000), (40, 40), (399, 400)])
def test_losses_alone_are_the_exact_binomial(lost, n) -> None:
    """Oracle: Clopper and Pearson's limits, and scipy's binomial tails, to nine digits and far into the tail."""
    difference = MeanDifference(changes(0, lost, n))
    assert difference.limits(0.95)[0] == pytest.approx(
        -beta.ppf(0.975, lost + 1, n - lost) if lost < n else -1, abs=1e-8)  # fmt: skip
    for drop in (0.001, 0.01, 0.15, 0.9):
        assert difference.p_at_most(-drop) == pytest.approx(binom.cdf(lost, n, drop), rel=1e-8, abs=1e-14)


@pytest.mark.parametrize("gained, lost", [(0, 6), (3, 12), (20, 40), (200, 260), (5, 5)])
def test_at_zero_it_is_mcnemars(gained, lost) -> None:
    difference = MeanDifference(changes(gained, lost, 700))
    assert difference.p_at_least(0.0) == pytest.approx(binom.sf(lost - 1, gained + lost, 0.5), rel=1e-8)


def test_below_zero_by_monte_carlo() -> None:
    """Gamma variables of any shapes, signs and sizes, drawn 500,000 times."""
    scales, shapes = np.array([0.3, -1.0, 2.5, -0.01, 0.0]), np.array([7.0, 1.0, 0.4, 30.0, 2.0])
    draws = np.random.default_rng(0).gamma(shapes, size=(500_000, 5)) @ scales
    assert below_zero(scales, shapes) == pytest.approx(float((draws <= 0).mean()), abs=0.002)
    assert below_zero(-scales, shapes) == pytest.approx(1 - below_zero(scales, shapes), abs=1e-12)


def enumerated(n: int, gain: float, loss: float, tables: dict) -> tuple[float, float]:
    """Exact probabilities that the lower limit is above the true difference, and the upper one below it."""
    above = below = 0.0
    for gained in range(n + 1 if gain else 1):
        if gain and comb(n, gained) * gain**gained * (1 - gain) ** (n - gained) < 1e-7:
            continue
        for lost in range(n - gained + 1):
            p = float(multinomial.pmf([gained, lost, n - gained - lost], n, [gain, loss, 1 - gain - loss]))
            if p > 1e-7:
                if (gained, lost) not in tables:
                    found = MeanDifference(changes(gained, lost, n))
                    tables[gained, lost] = found.p_at_most(gain - loss) < 0.025, found.p_at_least(gain - loss) < 0.025
                high, low = tables[gained, lost]
                above, below = above + p * high, below + p * low
    return above, below


@pytest.mark.parametrize("n, drop", [(12, 0.2), (40, 0.1), (100, 0.03), (400, 0.01)])
def test_one_sided_errors_are_exactly_within_their_level(n, drop) -> None:
    """All outcomes enumerated at several rates of wins: each limit errs in at most 2.5%, for few questions, too."""
    tables: dict = {}
    for gain in (0.0, 0.005, 0.02):
        above, below = enumerated(n, gain, gain + drop, tables)
        assert above <= 0.025
        assert below <= 0.025


@pytest.mark.parametrize("differences", [[0] * 50, changes(3, 9, 200), [0] * 39 + [0.3, -0.7], [1], [-1 / 3, 2 / 3, 0]])
def test_limits(differences) -> None:
    """They surround the estimate, mirror when the sides are swapped, widen with the level and are where p is reached."""
    difference = MeanDifference(differences)
    low, high = difference.limits(0.95)
    assert -1 <= low <= difference.mean <= high <= 1
    assert MeanDifference([-d for d in differences]).limits(0.95) == pytest.approx((-high, -low), abs=1e-8)
    wider = difference.limits(0.99)
    assert wider[0] <= low and high <= wider[1]
    assert low == -1 or difference.p_at_most(low) == pytest.approx(0.025, rel=1e-6)
    assert high == 1 or difference.p_at_least(high) == pytest.approx(0.025, rel=1e-6)
    p = [difference.p_at_most(mean) for mean in np.linspace(-0.99, 0.9, 90)]
    assert all(a <= b + 1e-12 for a, b in zip(p, p[1:], strict=False)), "an interval is one piece"


@pytest.mark.parametrize("graded", [False, True])
def test_losing_less_is_never_worse(graded) -> None:
    """60 random evaluations, also with images of 1 to 30 questions and few of them: one score raised after the other, from
    all lost to all won, both limits only rise. A loss and a win undone together raise the lower limit where it matters: a
    pass stays one."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        sizes = rng.integers(1, rng.choice([2, 4, 31]), rng.integers(1, 40))
        images = np.repeat(np.arange(len(sizes)), sizes)
        d = rng.choice([-1.0, 0.0, 1.0], len(images), p=rng.dirichlet([0.4, 3, 0.4]))
        d *= rng.random(len(d)) if graded else 1
        margin = rng.choice([0.01, 0.05, 0.15, 0.3])
        for place in rng.permutation(np.flatnonzero(d < 1))[:6]:
            before = MeanDifference(d, images)
            d[place] = rng.uniform(d[place], 1) if graded else d[place] + 1
            after = MeanDifference(d, images)
            assert after.p_at_most(-margin) <= before.p_at_most(-margin) + 1e-12
            assert after.p_at_least(-margin) >= before.p_at_least(-margin) - 1e-12
            assert RANK[verdict(after, margin, 0.95)] >= RANK[verdict(before, margin, 0.95)]
        lost, won = (np.flatnonzero(d == end) for end in (-1, 1))
        before, undone = MeanDifference(d, images), min(len(lost), len(won))
        d[rng.permutation(lost)[:undone]] = d[rng.permutation(won)[:undone]] = 0
        if verdict(before, margin, 0.95) == "pass":
            assert verdict(MeanDifference(d, images), margin, 0.95) == "pass"


@pytest.mark.parametrize(
    "questions, images, margin", [(112, 12, 0.15), (1200, 300, 0.01), (1600, 400, 0.01), (72, 36, 0.1)]
)
def test_no_change_has_the_best_verdict_and_interval(questions, images, margin) -> None:
    """What a user saw: no answer changed, can't tell; five lost and three won, pass. Every number of changes up to ten."""
    names, right = [i % images for i in range(questions)], [1.0] * questions
    unchanged = compare(right, right, names, margin=margin)
    assert (unchanged.verdict == "pass") == (images >= fewest(margin, 0.95))
    for lost, won in product((0, 3, 5, 10), (0, 3, 5)):
        before = [1.0] * lost + [0.0] * won + right[lost + won :]
        after = [0.0] * lost + [1.0] * won + right[lost + won :]
        found = compare(before, after, names, margin=margin)
        if lost >= won:
            assert found.low <= unchanged.low + 1e-9 and RANK[found.verdict] <= RANK[unchanged.verdict]


def test_images_that_lose_everything_are_within_the_error() -> None:
    """The share of images without a loss, were as many lost as the bound allows, is 2.5%: no test could promise more."""
    for images in (12, 36, 300):
        low = MeanDifference([0] * 7 * images, [i % images for i in range(7 * images)]).limits(0.95)[0]
        assert (1 + low) ** images == pytest.approx(0.025)
        assert fewest(-low + 1e-9, 0.95) == images


def test_sizes_of_images() -> None:
    """Kish's effective number; whole images lost are one question each; the variance where more of them are lost."""
    even = MeanDifference([-1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 2, 2, 3, 3])
    assert (even.images, even.size, even.variance()) == (4, 1, pytest.approx(0.25 * 0.75))
    assert even.limits(0.95) == pytest.approx(MeanDifference([-1, 0, 0, 0]).limits(0.95))
    assert even.variance(-0.5) == pytest.approx(0.5 * 0.5), "half the images lost"
    uneven = MeanDifference([0] * 10, [0] * 7 + [1, 2, 3])
    assert uneven.images == pytest.approx(100 / 52)

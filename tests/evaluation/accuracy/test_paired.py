"""Bounds and tests of a mean paired difference against exact tests, enumeration, simulation and slow, obvious versions.

Among them the promise that fewer losses are never worse.
"""

from __future__ import annotations

import math
from itertools import product
from math import comb
from random import Random
from statistics import fmean, pvariance

import numpy as np
import pytest
from scipy.stats import beta, binom, binomtest, multinomial

from vlmcompress.evaluation.accuracy.compare import compare
from vlmcompress.evaluation.accuracy.noninferiority import min_images_to_pass, verdict
from vlmcompress.evaluation.accuracy.paired import MeanDifference, below_zero, sign_flip_p, sums_by_image

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
                    difference = MeanDifference(changes(gained, lost, n))
                    tables[gained, lost] = (
                        difference.p_at_most(gain - loss) < 0.025,
                        difference.p_at_least(gain - loss) < 0.025,
                    )
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
def test_fewer_losses_are_never_worse(graded) -> None:
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
    assert (unchanged.verdict == "pass") == (images >= min_images_to_pass(margin, 0.95))
    for lost, won in product((0, 3, 5, 10), (0, 3, 5)):
        before = [1.0] * lost + [0.0] * won + right[lost + won :]
        after = [0.0] * lost + [1.0] * won + right[lost + won :]
        changed = compare(before, after, names, margin=margin)
        if lost >= won:
            assert changed.low <= unchanged.low + 1e-9 and RANK[changed.verdict] <= RANK[unchanged.verdict]


def test_images_that_lose_everything_are_within_the_error() -> None:
    """The share of images without a loss, were as many lost as the bound allows, is 2.5%: no test could promise more."""
    for images in (12, 36, 300):
        low = MeanDifference([0] * 7 * images, [i % images for i in range(7 * images)]).limits(0.95)[0]
        assert (1 + low) ** images == pytest.approx(0.025)
        assert min_images_to_pass(-low + 1e-9, 0.95) == images


@pytest.mark.parametrize(
    "documents, questions, photos, margin",
    [
        (10, 20, 800, 0.02),
        (10, 10, 900, 0.01),
        (40, 6, 760, 0.01),
        (20, 10, 800, 0.02),
        (50, 4, 800, 0.01),
        (1, 100, 900, 0.05),
    ],
)
def test_losses_that_go_with_size_are_within_the_error(documents, questions, photos, margin) -> None:
    """Documents lose all or half of their answers so often that the true loss is the margin, photos of one question none: all
    numbers of lost documents enumerated, a wrong pass and a wrong fail are each within 2.5%."""
    names = [f"document {i // questions}" for i in range(documents * questions)] + [f"photo {i}" for i in range(photos)]
    for share in (1.0, 0.5):
        chance = margin * len(names) / (documents * questions * share)
        for truth, wrong in ((-1, "pass"), (1, "fail")):
            rate = 0.0
            for lost in range(documents + 1):
                d = np.zeros(len(names))
                d[: documents * questions].reshape(documents, questions)[:lost, : round(share * questions)] = -1
                rate += binom.pmf(lost, documents, chance) * (verdict(MeanDifference(d, names), margin, 0.95) == wrong)
            assert rate <= 0.025, (share, truth, wrong)


@pytest.mark.parametrize("images, documents, questions", [(4000, 8, 5), (4000, 12, 4), (1000, 5, 10), (300, 4, 20)])
def test_rare_large_images_of_a_random_draw_are_within_the_error(images, documents, questions) -> None:
    """Each image is with a small chance a document that loses all, so that the number of documents is chance, too: all numbers
    enumerated, a verdict at a margin of the true loss passes in at most 2.5%."""
    share, rate = documents / images, 0.0
    margin = share * questions / (share * questions + 1 - share)
    for number in range(3 * documents):
        d = np.concatenate([-np.ones(number * questions), np.zeros(images - number)])
        names = np.concatenate([np.repeat(np.arange(number), questions), np.arange(number, images)])
        rate += binom.pmf(number, images, share) * (verdict(MeanDifference(d, names), margin, 0.95) == "pass")
    assert rate <= 0.025
    assert rate >= binom.pmf(0, images, share) - 1e-12, "with no document in the test set nothing can be known of them"


def test_error_of_images_of_any_sizes_and_chances() -> None:
    """Small random evaluations in which each image has a size and a chance of its own: all outcomes enumerated, P(p <= u) is at
    most u for each u up to 0.2 that occurs, but for 5% of it, where chances of two or three images are far apart."""
    rng, excess = np.random.default_rng(0), []
    for _ in range(60):
        sizes = rng.choice([1, 1, 2, 3, 10], rng.integers(2, 6))
        low, high = -sizes, sizes * rng.choice([0.0, 0.3, 1.0])
        chance = rng.random(len(sizes)) ** rng.choice([0.3, 1, 3])
        truth = float((chance * low + (1 - chance) * high).sum() / sizes.sum())
        images, outcomes = np.repeat(np.arange(len(sizes)), sizes), []
        for lost in product((False, True), repeat=len(sizes)):
            d = (np.where(lost, low, high) / sizes)[images]
            outcomes.append((MeanDifference(d, images).p_at_most(truth), np.where(lost, chance, 1 - chance).prod()))
        p, mass = np.array(sorted(outcomes)).T
        excess.append(max(mass[p <= u + 1e-12].sum() / u for u in [0.2, *p] if 1e-6 < u <= 0.2))
    assert max(excess) <= 1.05
    assert max(excess) > 0.9, "and the bound is not far above"


def test_p_by_its_definition() -> None:
    """Oracle: the level found by pouring in small steps, and Gaffke's probability by 400,000 draws."""
    rng = np.random.default_rng(1)
    for sizes, sums, limit in (
        ([20, 20, 10, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, 0], -0.3),
        ([7, 2, 1, 1, 1], [-1, 1, 0, -1, 0], -0.5),
        ([5, 5, 1], [5, 5, 1], 0.4),
    ):
        d = np.concatenate([np.full(m, s / m) for m, s in zip(sizes, sums, strict=True)])
        images = np.repeat(np.arange(len(sizes)), sizes)
        m, s = np.array(sizes, float), np.array(sums, float)
        observed = s.sum() / m.sum()
        rest, volume, step = m * (1 + observed), (observed - limit) * m.sum(), 1e-3
        for _ in range(round(volume / step)):
            rest[rest.argmax()] -= step
        draws = rng.exponential(size=(400_000, len(m) + 1))
        allowed = ((m * (1 + observed) - rest - observed * m, rest.max()), (-limit * m, (1 + limit) * m.max()))
        p = [(draws[:, 1:] @ (s + t) <= draws[:, 0] * further).mean() for t, further in allowed]
        assert MeanDifference(d, images).p_at_most(limit) == pytest.approx(max(p), abs=0.004)


def test_one_document_with_a_tenth_of_the_questions() -> None:
    """Where nothing changed, more such documents, all lost, could be as rare as the limit; 37 of them rule out a point."""
    names = [0] * 100 + list(range(1, 901))
    loss = -MeanDifference([0] * 1000, names).limits(0.95)[0]
    # P(sum_i E_i loss m_i <= E_0 L) of exponentials is the product of L / (L + loss m_i)
    further = (1 - loss) * 100
    assert further / (further + 100 * loss) * (further / (further + loss)) ** 900 == pytest.approx(0.025)
    alone = compare([1.0] * 1000, [1.0] * 1000, names)
    assert (alone.verdict, alone.heavy, alone.largest) == ("inconclusive", True, 100)
    times = math.ceil(alone.needed / 1000)
    assert times == 37
    repeated = [f"{name} {copy}" for copy in range(times) for name in names]
    assert compare([1.0] * len(repeated), [1.0] * len(repeated), repeated).verdict == "pass"


def test_sizes_of_images() -> None:
    """Kish's effective number; whole images lost are one question each; the variance where more of them are lost."""
    even = MeanDifference([-1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 2, 2, 3, 3])
    assert (even.images, even.size, even.variance()) == (4, 1, pytest.approx(0.25 * 0.75))
    assert even.limits(0.95) == pytest.approx(MeanDifference([-1, 0, 0, 0]).limits(0.95))
    assert even.variance(-0.5) == pytest.approx(0.5 * 0.5), "half the images lost"
    uneven = MeanDifference([0] * 10, [0] * 7 + [1, 2, 3])
    assert uneven.images == pytest.approx(100 / 52)


@pytest.mark.parametrize("gained, lost", [(0, 0), (0, 1), (1, 0), (3, 3), (0, 5), (9, 2), (20, 31)])
def test_p_is_exact_mcnemar_without_clusters(gained: int, lost: int) -> None:
    """Oracles: scipy's exact binomial test of the discordant pairs, and the binomial sum written out."""
    p = sign_flip_p([1] * gained + [-1] * lost + [0] * 7)
    n = gained + lost
    assert p == pytest.approx(binomtest(gained, n).pvalue if n else 1.0)
    tail = sum(comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(gained - lost))
    assert p == pytest.approx(tail / 2**n)


@pytest.mark.parametrize("changes", [[2, -1, 1], [3, 3, -2, 1, 0], [-1, -1, -4, 2, 2, 1]])
def test_p_with_clusters_enumerates_all_signs(changes: list[int]) -> None:
    """Oracle: all 2^k sign choices, one by one."""
    totals = [abs(sum(s * sign for s, sign in zip(changes, signs, strict=True)))
              for signs in product((-1, 1), repeat=len(changes))]  # fmt: skip
    assert sign_flip_p(changes) == pytest.approx(sum(t >= abs(sum(changes)) for t in totals) / len(totals))


def simulate(rng: Random, clusters: int, size: int, gain: float, loss: float, together: float):
    """Right/wrong of two models; with probability `together` a cluster's questions share their outcome."""
    baseline, candidate, names = [], [], []

    def draw() -> tuple[bool, bool]:
        u = rng.random()
        return (False, True) if u < gain else (True, False) if u < gain + loss else (True, True)

    for cluster in range(clusters):
        shared = draw() if rng.random() < together else None
        for _ in range(size):
            b, c = shared or draw()
            baseline.append(b)
            candidate.append(c)
            names.append(cluster)
    return baseline, candidate, names


@pytest.mark.parametrize(
    "clusters, size, gain, loss, together, least",
    [
        (40, 1, 0.02, 0.02, 0.0, 0.94),
        (100, 1, 0.05, 0.10, 0.0, 0.93),
        (300, 1, 0.01, 0.0, 0.0, 0.93),
        (120, 3, 0.05, 0.08, 0.0, 0.93),
        (120, 3, 0.05, 0.08, 0.9, 0.92),
    ],
)
def test_interval_covers_the_truth(clusters, size, gain, loss, together, least) -> None:
    """Simulation: 95% intervals hold the true difference about 95% of the time, dependent questions or not."""
    rng = Random(7)
    runs = [covers(gain - loss, *simulate(rng, clusters, size, gain, loss, together)) for _ in range(500)]
    assert fmean(runs) >= least


def test_ignoring_the_images_would_be_wrong() -> None:
    """Simulation: the same dependent data without cluster names covers clearly too rarely, so the clusters matter."""
    rng = Random(7)
    assert fmean(covers(-0.03, *simulate(rng, 120, 3, 0.05, 0.08, 0.9)[:2]) for _ in range(300)) < 0.88


def covers(truth: float, baseline, candidate, names=None) -> bool:
    """Whether the 95% interval holds the truth: neither p-value is below 2.5%."""
    difference = MeanDifference([int(c) - int(b) for b, c in zip(baseline, candidate, strict=True)], names)
    return min(difference.p_at_most(truth), difference.p_at_least(truth)) >= 0.025


def test_p_under_the_null_is_uniform_or_larger() -> None:
    """Simulation: no true difference gives p <= 0.05 in at most about 5% of runs, with dependent questions too."""
    rng, small = Random(3), 0
    for _ in range(400):
        baseline, candidate, names = simulate(rng, 60, 3, 0.06, 0.06, 0.8)
        d = [int(c) - int(b) for b, c in zip(baseline, candidate, strict=True)]
        small += sign_flip_p([round(s) for s in sums_by_image(d, names)[0]]) <= 0.05
    assert small / 400 <= 0.07


def test_design_effect() -> None:
    """Fully dependent pairs: 2. Independent: 1, never below. Nothing changed: as if dependent, so that images count."""

    def effect(differences, names):
        return MeanDifference(differences, names).design_effect

    assert effect([1, 1, 0, 0, -1, -1, 0, 0] * 5, [i // 2 for i in range(40)]) == pytest.approx(2.0)
    assert effect([1, -1] * 20, [i // 2 for i in range(40)]) == 1.0
    assert effect([0] * 6, range(6)) == 1.0
    assert effect([0] * 6, [0, 0, 0, 1, 1, 1]) == pytest.approx(3.0)


def test_design_effect_is_kishs_with_much_data() -> None:
    """Oracle: the variance of the mean over many simulated evaluations, by that of independent samples."""
    rng = Random(5)
    means, effects, variances = [], [], []
    for _ in range(400):
        baseline, candidate, names = simulate(rng, 150, 3, 0.1, 0.1, 0.6)
        d = [int(c) - int(b) for b, c in zip(baseline, candidate, strict=True)]
        means.append(fmean(d))
        effects.append(MeanDifference(d, names).design_effect)
        variances.append(pvariance(d) / len(d))
    assert fmean(effects) == pytest.approx(pvariance(means) / fmean(variances), rel=0.2)

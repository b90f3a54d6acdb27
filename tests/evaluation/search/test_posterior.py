"""Beliefs about accuracy against slow, plain computations and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from vlmcompress.evaluation.accuracy import compare
from vlmcompress.evaluation.accuracy.noninferiority import min_images_to_pass
from vlmcompress.evaluation.search import posterior
from vlmcompress.evaluation.search.posterior import Evidence, Posterior, assurance, expected_gain, posteriors, refuted
from vlmcompress.evaluation.search.successive_halving import LIKELY, Rules, SuccessiveHalving

MARGIN = 0.02


def evidence(lost: int, won: int, n: int, divergence: float | None) -> Evidence:
    return Evidence([-1.0] * lost + [1.0] * won + [0.0] * (n - lost - won), list(range(n)), divergence)


FOUND = {
    "a": evidence(1, 1, 200, 0.003),
    "b": evidence(3, 1, 200, 0.05),
    "c": evidence(9, 2, 200, 0.15),
    "d": evidence(40, 3, 200, 0.9),
    "e": evidence(3, 4, 48, 0.02),
}


def plain_noise(differences) -> float:
    """Variance of a mean over images of their own: of a mixture with lost ones that has its mean at the margin."""
    d = np.array(differences)
    lost = max((d.mean() + MARGIN) / (1 + d.mean()), 0.0)
    values, weights = np.append(d, -1.0), np.append((1 - lost) * np.full(len(d), 1 / len(d)), lost)
    mean = weights @ values
    return float(weights @ (values - mean) ** 2) / len(d)


def plain_slope(candidates: dict[str, Evidence]) -> tuple[float, float, float]:
    """DerSimonian and Laird's estimate as their paper has it: fixed weights, Q, tau^2, random weights."""
    k = np.array([answers.divergence for answers in candidates.values()])
    slopes = -np.array([np.mean(answers.differences) for answers in candidates.values()]) / k
    w = k**2 / np.array([plain_noise(answers.differences) for answers in candidates.values()])
    fixed = np.average(slopes, weights=w)
    q = (w * (slopes - fixed) ** 2).sum()
    tau2 = (q - (len(k) - 1)) / (w.sum() - (w**2).sum() / w.sum())
    tau2 = max(tau2, (fixed / 3) ** 2)
    again = 1 / (1 / w + tau2)
    return np.average(slopes, weights=again), tau2, 1 / again.sum()


@pytest.mark.parametrize("losses", [(), (("b", 20), ("e", 12))])
def test_posterior_is_bayes(losses) -> None:
    """Oracle: likelihood times prior over a grid of differences, the slope estimated plainly; slopes alike and not."""
    candidates = FOUND | {name: evidence(lost, 0, 200, FOUND[name].divergence) for name, lost in losses}
    slope, tau2, doubt = plain_slope(candidates)
    assert (tau2 > (slope / 3) ** 2 * 1.01) == bool(losses)
    grid = np.linspace(-0.6, 0.3, 400_001)
    for name, believed in posteriors(candidates, MARGIN).items():
        answers = candidates[name]
        n, k = len(answers.differences), answers.divergence
        nats = slope**2 * 4.0 * (k + 0.2 / n) / n
        prior = norm.pdf(grid, -slope * k, math.sqrt(k**2 * (tau2 + doubt) + nats + 1e-6))
        density = prior * norm.pdf(np.mean(answers.differences), grid, math.sqrt(plain_noise(answers.differences)))
        density /= density.sum()
        mean = (density * grid).sum()
        assert believed.mean == pytest.approx(mean, abs=1e-6)
        assert believed.variance == pytest.approx((density * (grid - mean) ** 2).sum(), rel=1e-4)


def test_beliefs_do_not_depend_on_order() -> None:
    backwards = dict(reversed(FOUND.items()))
    assert posteriors(backwards, MARGIN) == pytest.approx(posteriors(FOUND, MARGIN))


def test_a_candidate_that_lost_nothing_is_not_believed_perfect() -> None:
    """Without others it might still lose more than the margin; its divergence makes it surer."""
    alone = posteriors({"x": evidence(0, 0, 40, None)}, MARGIN)["x"]
    assert alone.mean == 0 and norm.cdf(-MARGIN, alone.mean, math.sqrt(alone.variance)) > 0.1
    low, high = (posteriors(FOUND | {"x": evidence(0, 0, 40, k)}, MARGIN)["x"] for k in (0.001, 0.5))
    assert high.mean < low.mean < 0
    assert low.variance < alone.variance


@pytest.mark.parametrize("names", ["", "a", "ab"])
def test_fewer_than_three_candidates_give_no_slope(names) -> None:
    candidates = {name: FOUND[name] for name in names}
    for name, believed in posteriors(candidates, MARGIN).items():
        assert believed.mean == pytest.approx(np.mean(candidates[name].differences))
        assert believed.variance == pytest.approx(plain_noise(candidates[name].differences))


def test_without_a_divergence_the_answers_alone_count() -> None:
    answers = evidence(3, 1, 200, None)
    with_others = posteriors(FOUND | {"x": answers}, MARGIN)
    assert with_others["x"] == posteriors({"x": answers}, MARGIN)["x"]
    assert {name: with_others[name] for name in FOUND} == posteriors(FOUND, MARGIN)


def test_a_divergence_of_zero_is_no_loss() -> None:
    """It tells nothing of the slope, and what it does not show is at most about a tenth of a point."""
    fitted = posteriors(FOUND | {"x": evidence(0, 0, 900, 0.0)}, MARGIN)
    assert {name: fitted[name] for name in FOUND} == posteriors(FOUND, MARGIN)
    assert fitted["x"].mean == 0 and math.sqrt(fitted["x"].variance) < 0.0015


def test_one_candidate_that_outweighs_all_others() -> None:
    """Weights of slopes differ as the squares of divergences; the moments' divisor was zero."""
    candidates = {"a": evidence(0, 0, 48, 1e-10), "b": evidence(1, 0, 48, 1e-10), "c": evidence(9, 0, 48, 1.0)}
    assert posteriors(candidates, MARGIN)["c"].mean == pytest.approx(-9 / 48, abs=0.01)


def test_slopes_below_zero_are_not_believed() -> None:
    """Where all gained, more divergence is no promise of more right answers."""
    candidates = {str(k): evidence(0, 2, 100, k) for k in (0.01, 0.1, 1.0)}
    assert (
        posterior._slope(
            [(answers.divergence, *posterior._observed(answers, MARGIN)) for answers in candidates.values()]
        )[0]
        == 0
    )
    assert all(0 <= believed.mean <= 0.02 for believed in posteriors(candidates, MARGIN).values())


def test_two_changes_add_up() -> None:
    assert Posterior(-0.01, 2e-6) + Posterior(-0.02, 3e-6) == Posterior(-0.03, pytest.approx(5e-6))


@pytest.mark.parametrize("questions", [None, 500, 2000])
@pytest.mark.parametrize("mean, deviation", [(-0.004, 0.003), (-0.012, 0.01), (0.001, 0.0)])
def test_assurance_is_how_often_a_test_confirms(questions, mean, deviation) -> None:
    """Monte Carlo: a true difference of the posterior, a test's mean of that, and whether its limit is above the margin."""
    rng, variance, draws = np.random.default_rng(0), 0.015, 400_000
    truth = rng.normal(mean, deviation, draws)
    limit = truth
    if questions:
        error = math.sqrt(variance / questions)
        limit = rng.normal(truth, error) - 1.959964 * error
    output = float((limit > -0.01).mean())
    assert assurance(Posterior(mean, deviation**2), 0.01, questions, variance) == pytest.approx(output, abs=0.004)


def test_assurance_predicts_verdicts() -> None:
    """The chance of an `eval` of 2,000 questions, one way of changing, against 300 of them."""
    rng, loss = np.random.default_rng(1), 0.012
    verdicts = []
    for _ in range(300):
        after = (rng.random(2000) >= loss).astype(float)
        differences = Evidence(after - 1, range(2000), None).mean
        verdicts.append(posterior.noninferiority.verdict(differences, MARGIN, 0.95) == "pass")
    predicted = assurance(Posterior(-loss, 0.0), MARGIN, 2000, MARGIN)
    assert predicted == pytest.approx(np.mean(verdicts), abs=0.1)
    assert compare.compare([1.0] * 2000, after.tolist(), margin=MARGIN).verdict == (
        "pass" if verdicts[-1] else "inconclusive"
    )


@pytest.mark.parametrize("images, each, margin", [(12, 9, 0.2), (18, 2, 0.1), (300, 1, 0.01)])
def test_a_candidate_that_changes_no_answer_is_most_likely_confirmed(images, each, margin) -> None:
    """A search threw lossless candidates out (chance 25%) for one that lost 5 and won 3 (83%), as questions shared images. Here
    with no confirmation, with the fewest images that can confirm, and with more; up to eight answers lost, some of them won."""
    place = np.random.default_rng(0).permutation(images * each)
    for confirming in (None, min_images_to_pass(margin, 0.95), 3 * min_images_to_pass(margin, 0.95)):
        halving = SuccessiveHalving([], None, Rules(margin, 900, confirming))

        def chance(lost: int, won: int, halving: SuccessiveHalving = halving) -> float:
            differences = np.zeros(images * each)
            differences[place[:lost]], differences[place[lost : lost + won]] = -1, 1
            answers = Evidence(differences, [i % images for i in range(images * each)], None)
            return halving.chance(posteriors({"": answers}, margin)[""], answers)

        assert chance(0, 0) >= LIKELY
        for lost in range(1, 9):
            assert all(chance(lost, won) < chance(0, 0) for won in range(lost))


def test_expected_gain_is_the_mean_over_outcomes() -> None:
    assert expected_gain(3.0, 0.25) == 0.25 * 3.0 + 0.75 * 1.0
    assert expected_gain(2.0, 0.0) == 1 and expected_gain(2.0, 1.0) == 2 and expected_gain(0.5, 1.0) == 0.5


@pytest.mark.parametrize("shared", [1, 3])
def test_a_candidate_above_the_floor_is_rarely_refuted(shared) -> None:
    """A true loss right at the margin, looked at four times: 2.5% at most over all looks, within Monte Carlo error."""
    rng, looks, runs, out = np.random.default_rng(2), (48, 100, 300, 900), 1000, 0
    images = np.repeat(np.arange(300 * 3 // shared), shared)
    for _ in range(runs):
        fate = np.where(rng.random(900) < 0.5, rng.random(900)[images], rng.random(900))
        answers = np.where(fate < 0.01 + MARGIN, -1.0, np.where(fate < 0.02 + MARGIN, 1.0, 0.0))
        out += any(refuted(Evidence(answers[:n], images[:n].tolist(), None), MARGIN, len(looks)) for n in looks)
    assert out / runs <= 0.025 + 2.6 * math.sqrt(0.025 * 0.975 / runs)


def test_a_candidate_far_below_the_floor_is_refuted_early() -> None:
    assert refuted(evidence(16, 0, 48, None), MARGIN, 4)
    assert not refuted(evidence(2, 0, 48, None), MARGIN, 4)

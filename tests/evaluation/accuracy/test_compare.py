"""Comparisons, verdicts, sample sizes, families and divergences against closed forms, scipy and simulation."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import binomtest, entropy, poisson

from vlmcompress.evaluation.accuracy import noninferiority
from vlmcompress.evaluation.accuracy.compare import (
    by_family,
    compare,
    families,
    first_token_divergence,
    holm,
    kl,
    pairs,
)
from vlmcompress.evaluation.accuracy.paired import MeanDifference, monte_carlo_p, sign_flip_p
from vlmcompress.evaluation.results import Scored


def answers(both: int, lost: int, gained: int, neither: int) -> tuple[list[float], list[float]]:
    return (
        [1.0] * (both + lost) + [0.0] * (gained + neither),
        [1.0] * both + [0.0] * lost + [1.0] * gained + [0.0] * neither,
    )


def test_changes_are_counted_in_both_directions() -> None:
    c = compare(*answers(880, 9, 3, 8), margin=0.02)
    assert (c.n, c.clusters, c.both, c.baseline_only, c.candidate_only, c.neither) == (
        900, 900, 880, 9, 3, 8)  # fmt: skip
    assert (c.baseline, c.candidate) == pytest.approx((889 / 900, 883 / 900))
    assert c.difference == pytest.approx(-6 / 900)
    assert c.p == pytest.approx(binomtest(3, 12).pvalue)
    assert (c.method, c.design_effect, c.verdict, c.needed) == (
        "gaffke",
        1.0,
        "pass",
        None,
    )


@pytest.mark.parametrize("lost, n", [(0, 100), (0, 380), (0, 420), (5, 900), (30, 900), (90, 900), (400, 400)])
def test_the_verdict_is_where_the_limits_are(lost, n) -> None:
    """Pass iff the lower limit is above -margin, fail iff the upper one is below it."""
    comparison = compare(*answers(n - lost, lost, 0, 0))
    expected = "pass" if comparison.low > -0.01 else "fail" if comparison.high < -0.01 else "inconclusive"
    assert comparison.verdict == expected
    assert (comparison.needed is not None) == (expected == "inconclusive")


@pytest.mark.parametrize("right, passes", [(0, False), (1, False), (7, False), (30, True), (400, True)])
def test_a_test_without_power_does_not_pass(right, passes) -> None:
    """No answer differs. A margin of a point: the baseline must be right in clearly more than a point of the questions, as a
    candidate that loses all of them has to fail; graded scores likewise."""
    n = 400
    for score in (1.0, 0.5):
        scores = [score] * right + [0.0] * (n - right)
        comparison = compare(scores, scores)
        if score == 1.0 or right in (0, 400):
            assert comparison.sensitive == passes
        assert comparison.verdict == ("pass" if comparison.sensitive else "inconclusive")
        assert comparison.needed is None
        everything = compare(scores, [0.0] * n)
        assert (everything.verdict == "fail") == comparison.sensitive


def test_no_losses_pass_from_the_sample_size_of_the_poisson_bound() -> None:
    """No loss in n refutes a rate of 1% when n is about 3.7 / 1%: P(0 losses) = 2.5%. Shared images: as many of them."""
    least = noninferiority.min_images_to_pass(0.01, 0.95)
    assert least == math.ceil(math.log(0.025) / math.log(0.99))
    assert compare(*answers(least, 0, 0, 0)).verdict == "pass"
    assert compare(*answers(least - 1, 0, 0, 0)).verdict == "inconclusive"
    few = compare(*answers(200, 0, 0, 0))
    assert (few.unit, few.missing) == ("samples", pytest.approx(least - 200, abs=1))
    shared = compare(*answers(120, 0, 0, 0), [i % 12 for i in range(120)])
    assert (shared.unit, shared.missing) == ("images", pytest.approx(least - 12, abs=5))


def test_graded_scores() -> None:
    """The mean and its interval; with plenty of data the latter is that of the t-test, its p-value too."""
    rng = np.random.default_rng(1)
    before = rng.choice([0, 0.3, 0.6, 1.0], 3000)
    after = np.where(rng.random(3000) < 0.7, before, rng.choice([0, 0.3, 0.6, 1.0], 3000))
    comparison = compare(before.tolist(), after.tolist())
    change = after - before
    error = change.std(ddof=1) / math.sqrt(3000)
    assert comparison.both is None
    assert (comparison.low, comparison.high) == pytest.approx(
        (change.mean() - 1.96 * error, change.mean() + 1.96 * error), abs=0.1 * error)  # fmt: skip
    assert comparison.p == pytest.approx(math.erfc(abs(change.mean() / error) / math.sqrt(2)), abs=0.02)


def test_graded_and_right_or_wrong_agree_on_the_same_scores() -> None:
    """One answer that scores 0.999 instead of 1 makes the scores graded and changes next to nothing."""
    before, after = answers(800, 20, 8, 72)
    binary, graded = compare(before, after), compare([0.999, *before[1:]], [0.999, *after[1:]])
    assert binary.both is not None and graded.both is None
    assert (graded.low, graded.high) == pytest.approx((binary.low, binary.high), abs=1e-4)


def test_questions_about_one_picture_count_less() -> None:
    before, after = answers(360, 24, 0, 16)
    alone = compare(before, after)
    shared = compare(before, after, [i // 4 for i in range(400)])
    assert shared.clusters == 100
    assert shared.design_effect == pytest.approx(4.0, rel=0.1)  # losses come in fours here
    assert shared.low < alone.low < alone.high < shared.high
    assert shared.p > alone.p
    assert shared.detectable > alone.detectable


def test_equal_answers_on_shared_pictures_do_not_count_as_independent_evidence() -> None:
    """Without any change nothing tells how dependent questions are: then images count, not questions."""
    comparison = compare(*answers(800, 0, 0, 0), [i // 4 for i in range(800)])
    assert comparison.design_effect == pytest.approx(4.0)
    assert comparison.verdict == "inconclusive"


def test_monte_carlo_p_is_the_exact_one() -> None:
    sums = [3, -1, 2, 2, -1, 1, 1, 4, -2, 1]
    assert monte_carlo_p([float(s) for s in sums]) == pytest.approx(sign_flip_p(sums), abs=0.01)
    halves = [s / 2 for s in (2, 1, 1, -1)]
    exact = np.mean([abs(np.dot(signs, halves)) >= 1.5 - 1e-9 for signs in product((-1, 1), repeat=4)])
    assert monte_carlo_p(halves) == pytest.approx(exact, abs=0.015)
    assert monte_carlo_p([0.0, 0.0]) == 1.0


def test_detectable_without_any_change_is_that_of_the_exact_test() -> None:
    """Losses only: six are significant (p = 1/32 at five), and are reached with 80% where their mean is 7.9."""
    expected = next(mean for mean in np.arange(4, 12, 0.01) if poisson.sf(5, mean) >= 0.8)
    assert 1000 * noninferiority.detectable(MeanDifference([0] * 1000), 0.95) == pytest.approx(expected, rel=0.25)


def test_detectable_and_needed_with_many_changes_are_the_textbooks() -> None:
    """Lachin (1981): z's summed, times the standard deviation, over the effect."""
    many = MeanDifference([1] * 400 + [-1] * 400 + [0] * 9200)
    drop = noninferiority.detectable(many, 0.95)
    error = math.sqrt((0.08 + drop) / 10_000)  # the drop's own losses change answers too
    assert drop == pytest.approx((1.95996 + 0.84162) * error, rel=0.02)
    few = [1] * 40 + [-1] * 40 + [0] * 920
    assert noninferiority.samples_needed(MeanDifference(few), 0.01, 0.95) == pytest.approx(
        2.80158**2 * 0.08 / 0.01**2, rel=0.05
    )
    thrice = MeanDifference(3 * few, 3 * list(range(1000)))
    assert noninferiority.samples_needed(thrice, 0.01, 0.95) == pytest.approx(3 * 2.80158**2 * 0.08 / 0.01**2, rel=0.05)
    assert noninferiority.samples_needed(MeanDifference([-1] + [0] * 99), 0.01, 0.95) is None


@pytest.mark.parametrize("lost, gained", [(20, 9), (32, 6)])
def test_needed_decides_in_four_of_five(lost, gained) -> None:
    """Simulation: with that many samples of the world that was seen, 80% of evaluations end in a verdict."""
    comparison, rng = compare(*answers(600 - lost - gained, lost, gained, 0), margin=0.03), np.random.default_rng(0)
    assert comparison.verdict == "inconclusive" and comparison.needed
    rates = [gained / 600, lost / 600, 1 - (gained + lost) / 600]
    decided = 0
    for b, c, rest in rng.multinomial(comparison.needed, rates, size=300):
        decided += noninferiority.verdict(MeanDifference([1] * b + [-1] * c + [0] * rest), 0.03, 0.95) != "inconclusive"
    assert decided / 300 == pytest.approx(0.8, abs=0.07)


def test_holm_by_hand() -> None:
    """Holm (1979): times 4, 3, 2, 1, never falling."""
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})  # fmt: skip
    assert holm({"a": 0.7, "b": 0.6}) == pytest.approx({"a": 1.0, "b": 1.0})


def test_families_fail_only_after_correction() -> None:
    """A family that fails on its own, barely, doesn't among twenty; one that is far off does."""
    bare = next(k for k in range(1, 100) if compare(*answers(200 - k, k, 0, 0), margin=0.05).verdict == "fail")
    groups = {f"fine {i}": (*answers(200, 0, 0, 0), None) for i in range(19)}
    groups["barely"] = (*answers(200 - bare, bare, 0, 0), None)
    compared = families(groups, margin=0.05)
    assert compared["barely"].verdict == "inconclusive"
    assert compared["fine 0"].verdict == "pass" and compared["fine 0"].adjusted_p == 1.0
    assert compared["barely"].adjusted_p == pytest.approx(20 * compared["barely"].p)
    assert families({"barely": groups["barely"]}, margin=0.05)["barely"].verdict == "fail"
    groups["off"] = (*answers(100, 100, 0, 0), None)
    assert families(groups, margin={"off": 0.05})["off"].verdict == "fail"


def sample(id: str, family: str, image: str, before: float, after: float) -> Scored:
    return Scored(id=id, suite="s", family=family, question="", expected="", baseline="", candidate="",
                  baseline_score=before, candidate_score=after, image=image)  # fmt: skip


def test_samples_without_image_stand_alone() -> None:
    samples = [
        sample("1", "a", "", 1, 0),
        sample("2", "a", "", 1, 1),
        sample("3", "b", "x", 0, 1),
        sample("4", "a", "x", 1, 1),
    ]
    assert compare(*pairs(samples)).clusters == 3
    assert {name: compare(*group).n for name, group in by_family(samples).items()} == {"a": 3, "b": 1}
    assert by_family([sample.model_copy(update={"family": "other"}) for sample in samples]) == {}, "none is named"


@pytest.mark.parametrize(
    "before, after, options, message",
    [
        ([], [], {}, "same, positive number"),
        ([1], [1, 0], {}, "same, positive number"),
        ([1.0], [1.5], {}, "0 to 1"),
        ([1.0], [math.nan], {}, "0 to 1"),
        ([1.0], [1.0], {"margin": 0.0}, "between 0 and 1"),
        ([1.0], [1.0], {"level": 95}, "between 0 and 1"),
    ],
)
def test_bad_scores(before, after, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        compare(before, after, **options)


def top(probabilities: np.ndarray, k: int) -> dict[str, float]:
    best = np.argsort(-probabilities)[:k]
    return {f"t{i}": float(np.log(probabilities[i])) for i in best}


def test_all_tokens_reported() -> None:
    """Oracle: scipy's relative entropy."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(8, 0.5), 2)
    assert kl(top(p, 8), top(q, 8)) == pytest.approx(entropy(p, q))
    assert kl(top(p, 8), top(p, 8)) == 0.0


@pytest.mark.parametrize("k", [1, 2, 5, 20, 50])
def test_few_tokens_give_a_lower_bound_that_rises(k) -> None:
    """Never above the divergence of the whole distributions; with more tokens it comes closer."""
    rng = np.random.default_rng(k)
    for _ in range(50):
        p = rng.dirichlet(np.full(50, 0.1))
        q = 0.8 * p + 0.2 * rng.dirichlet(np.full(50, 0.1))
        p, q = (side + 1e-6 for side in (p, q))
        p, q = p / p.sum(), q / q.sum()
        true = float(entropy(p, q))
        assert 0 <= kl(top(p, k), top(q, k)) <= true + 1e-9
        if k == 50:
            assert kl(top(p, k), top(q, k)) == pytest.approx(true, abs=1e-6)


def test_answers_with_nothing_in_common_have_a_finite_divergence() -> None:
    """All of the baseline's probability is on a token that the candidate doesn't report: large, but a number."""
    value = kl({"a": -1e-12}, {"b": -1e-12})
    assert 0 <= value < 25


def test_summary() -> None:
    """By hand: two equal samples, one that moved, two that are not known."""
    same, moved = {"a": np.log(0.9), "b": np.log(0.1)}, {"a": np.log(0.1), "b": np.log(0.9)}
    summary, values = first_token_divergence([same, same, same, None, same], [same, same, moved, same, {}])
    expected = 0.8 * np.log(9)
    assert values == [0.0, 0.0, pytest.approx(expected), None, None]
    assert summary is not None
    assert (summary.n, summary.median, summary.same_first) == (3, 0.0, pytest.approx(2 / 3))
    assert summary.mean == pytest.approx(expected / 3)
    assert summary.p95 == pytest.approx(0.9 * expected)
    assert first_token_divergence([None], [same]) == (None, [None])


def test_sides_must_be_as_long() -> None:
    with pytest.raises(ValueError):
        first_token_divergence([None], [])

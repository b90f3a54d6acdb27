"""The race, in worlds whose truth is known: answers are drawn once for each candidate, further questions take the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from scipy.stats import norm

from vlmcompress.evaluation.accuracy import noninferiority
from vlmcompress.evaluation.accuracy.paired import MeanDifference
from vlmcompress.evaluation.search.candidate import Candidate, Choice, Factor
from vlmcompress.evaluation.search.racing import (
    LIKELY,
    VARY,
    CandidateState,
    Estimate,
    Race,
    Trial,
    estimates,
    refuted,
)

SCHEMES = {"int8": (0.0, 1.3), "awq": (0.004, 1.6), "w2": (0.15, 1.9)}
REDUCERS = {"half": (0.002, 1.5), "quarter": (0.08, 2.0), "ninth": (0.5, 2.5)}
"""True loss and gain."""
RULES = (0.02, 900, 2000)
"""Margin, questions and images of the confirmation."""
BEST = "awq + half"


def factors(*groups: Mapping[str, tuple[float, float]]) -> list[Factor]:
    return [Factor(str(n), tuple(Choice(name, {name: True}) for name in group)) for n, group in enumerate(groups)]


@dataclass
class World:
    """Candidates whose losses add up and whose gains multiply. `foreknown`: gains known without a trial; `breaks`: names that
    fail from so many questions on; `most`: how many candidates there is time for."""

    truth: Mapping[str, tuple[float, float]]
    seed: int = 0
    breaks: Mapping[str, int] = field(default_factory=dict)
    foreknown: bool = False
    most: int | None = None
    measuring: bool = True
    divergence: bool = True
    log: list[tuple[str, int]] = field(default_factory=list)

    def loss(self, candidate: Candidate) -> float:
        return math.fsum(self.truth[choice.name][0] for choice in candidate.choices)

    def true_gain(self, candidate: Candidate) -> float:
        return math.prod(self.truth[choice.name][1] for choice in candidate.choices)

    def trial(self, candidate: Candidate, questions: int) -> Trial:
        if questions >= self.breaks.get(candidate.name, 10**9):
            return Trial(None, failed="no kernel")
        rng = np.random.default_rng([self.seed, *candidate.name.encode()])
        draws = rng.random(2000)[:questions]
        answers = np.where(draws < self.loss(candidate), -1.0, np.where(draws > 0.999, 1.0, 0.0))
        divergence = 4 * self.loss(candidate) + 0.0005 if self.divergence else None
        return Trial(MeanDifference(answers), divergence, 1.0 if self.foreknown else self.true_gain(candidate))

    def ask(self, candidates: Sequence[Candidate], questions: int) -> dict[str, Trial]:
        left = len(candidates) if self.most is None else max(self.most - len(self.log), 0)
        self.log += [(candidate.name, questions) for candidate in candidates[:left]]
        return {candidate.name: self.trial(candidate, questions) for candidate in candidates[:left]}

    def gain(self, candidate: Candidate) -> float | None:
        return self.true_gain(candidate) if self.foreknown else None

    def measured(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        return {candidate.name: self.true_gain(candidate) for candidate in candidates} if self.measuring else {}


def run(world: World, *groups, rules=RULES) -> tuple[Race, CandidateState | None]:
    race = Race(factors(*(groups or (SCHEMES, REDUCERS))), world, *rules)
    winner = race.run()
    for state in race.states.values():
        assert bool(state.out) != (state is winner), f"{state.candidate.name}: {state.out!r}"
    return race, winner


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("foreknown", [False, True])
def test_the_best_wins_where_differences_are_clear(seed, foreknown) -> None:
    """Everything else loses far more than the floor or gains less."""
    world = World(SCHEMES | REDUCERS, seed, foreknown=foreknown)
    race, winner = run(world)
    assert winner and winner.candidate.name == BEST
    assert winner.measured and winner.gain == pytest.approx(1.6 * 1.5) and winner.questions == 900
    assert winner.chance > 0.8 and winner.expected_gain == pytest.approx(1 + 1.4 * winner.chance)
    assert race.states["ninth"].out.startswith("loses more than is allowed, by ")
    assert "w2 + ninth" not in race.states, "no combination of what is refuted"


def test_without_divergences_the_best_still_wins() -> None:
    _, winner = run(World(SCHEMES | REDUCERS, divergence=False))
    assert winner and winner.candidate.name == BEST


def test_questions_are_counted() -> None:
    """Oracle: the log of questions; those of an earlier rung are not repeated."""
    world = World(SCHEMES | REDUCERS, breaks={"int8 + half": 300})
    race, _ = run(world)
    last: dict[str, int] = {}
    for name, questions in world.log:
        assert questions > last.get(name, 0)
        if not (name in world.breaks and questions >= world.breaks[name]):
            last[name] = questions
    assert race.questions_asked == sum(last.values())
    rounds = [questions for _, questions in world.log]
    assert rounds == sorted(rounds) and set(rounds) == {48, 100, 300, 900} and rounds.count(48) == 6


@pytest.mark.parametrize("questions, rounds", [(900, [100, 300, 900]), (300, [96, 100, 300]), (60, [60]), (96, [96])])
def test_rounds_grow_threefold_from_a_minimum(questions, rounds) -> None:
    race = Race([], World({}), 0.01, questions)
    assert [count for count, _ in race.rounds] == rounds and race.rounds[-1][1] == 3


def test_no_candidate_gets_more_questions_than_the_original() -> None:
    """The fewest questions that a search takes are fewer than single changes get elsewhere."""
    world = World(SCHEMES | REDUCERS)
    _, winner = run(world, rules=(0.3, 30))
    assert {questions for _, questions in world.log} == {30} and winner


@pytest.mark.parametrize("breaks", [{"half": 1}, {BEST: 1}, {BEST: 900}, {"awq": 100}])
def test_a_failed_candidate_does_not_stop_the_search(breaks) -> None:
    world = World(SCHEMES | REDUCERS, breaks=breaks)
    race, winner = run(world)
    (name,) = breaks
    assert race.states[name].out == "failed: no kernel"
    assert winner and winner.candidate.name == {"awq": BEST, "half": "awq", BEST: "int8 + half"}[name]


def test_all_fail() -> None:
    race, winner = run(World(SCHEMES | REDUCERS, breaks=dict.fromkeys(SCHEMES | REDUCERS, 1)))
    assert winner is None and race.questions_asked == 0 and len(race.states) == 6


@pytest.mark.parametrize("most", [0, 2, 6, 8, 14, 20])
def test_a_search_may_run_out_of_time_in_any_rung(most) -> None:
    """Who was not tried cannot win; the others can, by what is known of them."""
    world = World(SCHEMES | REDUCERS, most=most, measuring=False)
    race, winner = run(world)
    tried = {name for name, _ in world.log}
    untried = {name for name, state in race.states.items() if state.out == "no time left to try it"}
    assert not tried & untried and len(world.log) == most
    if most == 0:
        assert winner is None and untried == set(race.states)
    else:
        assert winner and winner.candidate.name in tried and not winner.measured
    if most == 2:
        assert untried >= {"w2", "half", "quarter", "ninth"}


def test_no_candidate_gains() -> None:
    slow = {name: (loss, 1.0) for name, (loss, _) in SCHEMES.items()}
    race, winner = run(World(slow), slow)
    assert winner is None
    assert {race.states[name].out for name in ("int8", "awq")} == {"gains nothing"}


def test_a_gain_that_the_measurement_refutes() -> None:
    """A finalist's measured gain counts, not what was predicted."""

    class Disappointing(World):
        def measured(self, candidates):
            return {candidate.name: 0.9 for candidate in candidates}

    race, winner = run(Disappointing(SCHEMES | REDUCERS))
    assert winner is None and race.states[BEST].gain == 0.9 and race.states[BEST].out == "gains nothing"


def test_the_result_does_not_depend_on_the_order_of_answers() -> None:
    class Backwards(World):
        def ask(self, candidates, questions):
            return dict(reversed(super().ask(candidates, questions).items()))

        def measured(self, candidates):
            return dict(reversed(super().measured(candidates).items()))

    world, other = World(SCHEMES | REDUCERS), Backwards(SCHEMES | REDUCERS)
    (first, winner), (second, again) = run(world), run(other)
    assert world.log == other.log and winner and again and winner.candidate == again.candidate
    assert {name: (s.out, s.chance) for name, s in first.states.items()} == {
        name: (s.out, pytest.approx(s.chance)) for name, s in second.states.items()
    }


def test_a_known_gain_is_used() -> None:
    """Trials of this world show no gain; known gains contradict them, of combinations, too."""
    race, winner = run(World(SCHEMES | REDUCERS, foreknown=True, measuring=False))
    assert winner and winner.candidate.name == BEST and winner.gain == pytest.approx(2.4)
    assert race.states["int8 + half"].gain == pytest.approx(1.3 * 1.5)


def test_the_next_best_come_in_place_of_the_refuted() -> None:
    """Of 17 single changes and 72 combinations 12, 6 and 3 go on; where the best are lossy, others get their places."""
    many = {f"s{i}": (0.0, 1.1 + i / 100) for i in range(8)}, {f"r{i}": (0.0, 1.2 + i / 100) for i in range(9)}
    world = World(many[0] | many[1])
    race, winner = run(world, *many)
    assert [sum(questions == n for _, questions in world.log) for n in (48, 100, 300, 900)] == [17, 12, 6, 3]
    assert len(race.states) == 17 + 72 and winner and winner.candidate.name == "s7 + r8"
    lossy = {f"r{i}": (0.06, 3.0 + i / 100) for i in range(4)} | {"safe": (0.0, 1.2)}
    world = World(lossy, divergence=False, seed=3)
    race, winner = run(world, lossy)
    assert winner and winner.candidate.name == "safe", "not one of those that gain more and were refuted"


def test_an_unlikely_winner_needs_no_likelier_one() -> None:
    """Five times the speed at 1 chance in 4 is worth as much as twice at a certain one; who is likely wins all the same."""
    likely, not_so = (CandidateState(Candidate((Choice(name, {}),)), gain, chance=chance,
                               trial=Trial(MeanDifference([0.0])))
                      for name, gain, chance in (("likely", 1.9, 0.99), ("unlikely", 5.0, 0.3)))  # fmt: skip
    race = Race([], World({}), *RULES)
    assert not_so.expected_gain > likely.expected_gain
    assert race._winner([not_so, likely]) is likely and not_so.out and not likely.out
    not_so.out = ""
    assert race._winner([not_so]) is not_so


def trial_of(lost: int, n: int, divergence: float | None = None) -> Trial:
    return Trial(MeanDifference([-1.0] * lost + [0.0] * (n - lost)), divergence)


def test_answers_and_divergence_together_are_bayes() -> None:
    """Oracle: likelihood times prior over a grid; without divergences, or with two of them, answers alone count."""
    trials = {name: trial_of(lost, 200, k) for name, lost, k in (("a", 1, 0.003), ("b", 9, 0.15), ("c", 40, 0.9))}
    of = estimates(trials, 0.02)
    alone = estimates({name: replace(trial, divergence=None) for name, trial in trials.items()}, 0.02)
    slope = 50 / 200 / 1.053
    grid = np.linspace(-0.8, 0.4, 400_001)
    for name, trial in trials.items():
        expected = slope * (trial.divergence or 0)
        density = norm.pdf(grid, -expected, math.hypot(VARY * expected, 1e-3))
        density *= norm.pdf(alone[name].mean, grid, math.sqrt(alone[name].variance))
        density /= density.sum()
        mean = (density * grid).sum()
        assert of[name].mean == pytest.approx(mean, abs=1e-6)
        assert of[name].variance == pytest.approx((density * (grid - mean) ** 2).sum(), rel=1e-4)
    assert alone["b"] == Estimate.of(MeanDifference([-1.0] * 9 + [0.0] * 191), 0.02)
    assert estimates({name: trials[name] for name in "ab"}, 0.02) == {name: alone[name] for name in "ab"}
    both = alone["a"] + alone["b"]
    assert both == Estimate(pytest.approx(-0.05), alone["a"].variance + alone["b"].variance, alone["b"].spread)


@pytest.mark.parametrize("questions", [None, 500, 2000])
@pytest.mark.parametrize("mean, deviation", [(-0.004, 0.003), (-0.012, 0.01), (0.001, 0.0)])
def test_assurance_is_how_often_a_test_confirms(questions, mean, deviation) -> None:
    """Monte Carlo: a true difference, a test's mean of that, and whether its limit is above the margin."""
    rng, variance, draws = np.random.default_rng(0), 0.015, 400_000
    limit = truth = rng.normal(mean, deviation, draws)
    if questions:
        error = math.sqrt(variance / questions)
        limit = rng.normal(truth, error) - 1.959964 * error
    chance = Estimate(mean, deviation**2, variance).assurance(0.01, questions)
    assert chance == pytest.approx(float((limit > -0.01).mean()), abs=0.004)


@pytest.mark.parametrize("images, each, margin", [(12, 9, 0.2), (18, 2, 0.1), (300, 1, 0.01)])
def test_a_candidate_that_changes_no_answer_is_most_likely_confirmed(images, each, margin) -> None:
    """A search threw lossless candidates out (chance 25%) for one that lost 5 and won 3 (83%), as questions shared images. Here
    with no confirmation, with the fewest images that can confirm, and with more; up to eight answers lost, some of them won."""
    place = np.random.default_rng(0).permutation(images * each)
    least = noninferiority.min_images_to_pass(margin, 0.95)
    for confirming in (None, least, 3 * least):

        def chance(lost: int, won: int, confirming: float | None = confirming) -> float:
            differences = np.zeros(images * each)
            differences[place[:lost]], differences[place[lost : lost + won]] = -1, 1
            answers = MeanDifference(differences, [i % images for i in range(images * each)])
            return Estimate.of(answers, margin).assurance(margin, confirming)

        assert chance(0, 0) >= LIKELY
        for lost in range(1, 9):
            assert all(chance(lost, won) < chance(0, 0) for won in range(lost))


@pytest.mark.parametrize("shared", [1, 3])
def test_a_candidate_above_the_floor_is_rarely_refuted(shared) -> None:
    """A true loss right at the margin, looked at four times: 2.5% at most over all looks, within Monte Carlo error."""
    rng, looks, runs, out, margin = np.random.default_rng(2), (48, 100, 300, 900), 1000, 0, 0.02
    images = np.repeat(np.arange(300 * 3 // shared), shared)
    for _ in range(runs):
        fate = np.where(rng.random(900) < 0.5, rng.random(900)[images], rng.random(900))
        answers = np.where(fate < 0.01 + margin, -1.0, np.where(fate < 0.02 + margin, 1.0, 0.0))
        out += any(refuted(MeanDifference(answers[:n], images[:n].tolist()), margin, len(looks)) for n in looks)
    assert out / runs <= 0.025 + 2.6 * math.sqrt(0.025 * 0.975 / runs)
    few, many = (trial_of(lost, 48).difference for lost in (2, 16))
    assert many and refuted(many, margin, 4) and few and not refuted(few, margin, 4)

"""The halving, in worlds whose truth is known: answers are drawn once for each candidate, and asking more goes on with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from vlmcompress.evaluation.search.candidate import Candidate, Choice, Factor
from vlmcompress.evaluation.search.posterior import Evidence
from vlmcompress.evaluation.search.successive_halving import ETA, CandidateState, Rules, SuccessiveHalving, Trial

SCHEMES = {"int8": (0.0, 1.3), "awq": (0.004, 1.6), "w2": (0.15, 1.9)}
REDUCERS = {"half": (0.002, 1.5), "quarter": (0.08, 2.0), "ninth": (0.5, 2.5)}
"""True loss and gain."""
RULES = Rules(0.02, 900, 2000)
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
        return Trial(
            Evidence(answers, range(questions), divergence), 1.0 if self.foreknown else self.true_gain(candidate)
        )

    def ask(self, candidates: Sequence[Candidate], questions: int) -> dict[str, Trial]:
        left = len(candidates) if self.most is None else max(self.most - len(self.log), 0)
        self.log += [(candidate.name, questions) for candidate in candidates[:left]]
        return {candidate.name: self.trial(candidate, questions) for candidate in candidates[:left]}

    def gain(self, candidate: Candidate) -> float | None:
        return self.true_gain(candidate) if self.foreknown else None

    def measured(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        return {candidate.name: self.true_gain(candidate) for candidate in candidates} if self.measuring else {}


def run(world: World, *groups, rules: Rules = RULES) -> tuple[SuccessiveHalving, CandidateState | None]:
    halving = SuccessiveHalving(factors(*(groups or (SCHEMES, REDUCERS))), world, rules)
    winner = halving.run()
    for state in halving.states.values():
        assert bool(state.out) != (state is winner), f"{state.candidate.name}: {state.out!r}"
    return halving, winner


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("foreknown", [False, True])
def test_the_best_wins_where_differences_are_clear(seed, foreknown) -> None:
    """Everything else loses far more than the floor or gains less."""
    world = World(SCHEMES | REDUCERS, seed, foreknown=foreknown)
    halving, winner = run(world)
    assert winner and winner.candidate.name == BEST
    assert winner.measured and winner.gain == pytest.approx(1.6 * 1.5) and winner.questions == 900
    assert winner.chance > 0.8 and winner.score == pytest.approx(1 + 1.4 * winner.chance)
    assert halving.states["ninth"].out.startswith("loses more than is allowed, by ")
    assert "w2 + ninth" not in halving.states, "no combination of what is refuted"


def test_a_reason_counts_the_candidates_own_questions() -> None:
    """Also of one that the time for a rung did not reach."""
    halving, _ = run(World(SCHEMES | REDUCERS, most=8))
    after = [state for state in halving.states.values() if state.out.startswith("behind others after")]
    assert after and all(state.out == f"behind others after {state.questions:,} questions" for state in after)
    assert any(state.questions not in halving.rules.rungs for state in after)


def test_without_divergences_the_best_still_wins() -> None:
    _, winner = run(World(SCHEMES | REDUCERS, divergence=False))
    assert winner and winner.candidate.name == BEST


def test_questions_are_counted() -> None:
    """Oracle: the log of questions; those of an earlier rung are not asked again."""
    world = World(SCHEMES | REDUCERS, breaks={"int8 + half": 300})
    halving, _ = run(world)
    last: dict[str, int] = {}
    for name, questions in world.log:
        assert questions > last.get(name, 0)
        if not (name in world.breaks and questions >= world.breaks[name]):
            last[name] = questions
    assert halving.questions_asked == sum(last.values())
    rungs = [questions for _, questions in world.log]
    assert rungs == sorted(rungs) and set(rungs) == {48, *halving.rules.rungs} == {48, 100, 300, 900}
    assert [rungs.count(n) for n in (48, 900)] == [6, 3]


@pytest.mark.parametrize("questions, rungs", [(900, [100, 300, 900]), (300, [96, 100, 300]), (60, [60]), (96, [96])])
def test_rungs_grow_threefold_from_a_minimum(questions, rungs) -> None:
    rules = Rules(0.01, questions)
    assert rules.rungs == rungs and rules.rungs[-1] == questions
    assert rules.looks == 1 + len(rungs) and ETA == 3


def test_no_candidate_gets_more_questions_than_the_original() -> None:
    """The fewest questions that a search takes are fewer than single changes are asked elsewhere."""
    world = World(SCHEMES | REDUCERS)
    _, winner = run(world, rules=Rules(0.3, 30))
    assert {questions for _, questions in world.log} == {30} and winner


@pytest.mark.parametrize("breaks", [{"half": 1}, {BEST: 1}, {BEST: 900}, {"awq": 100}])
def test_a_failed_candidate_does_not_stop_the_search(breaks) -> None:
    world = World(SCHEMES | REDUCERS, breaks=breaks)
    halving, winner = run(world)
    (name,) = breaks
    assert halving.states[name].out == "failed: no kernel"
    assert winner and winner.candidate.name == {"awq": BEST, "half": "awq", BEST: "int8 + half"}[name]


def test_all_fail() -> None:
    halving, winner = run(World(SCHEMES | REDUCERS, breaks=dict.fromkeys(SCHEMES | REDUCERS, 1)))
    assert winner is None and halving.questions_asked == 0 and len(halving.states) == 6


@pytest.mark.parametrize("most", [0, 2, 6, 8, 14, 20])
def test_a_search_may_run_out_of_time_in_any_rung(most) -> None:
    """Who was not tried cannot win; the others can, by what is known of them."""
    world = World(SCHEMES | REDUCERS, most=most, measuring=False)
    halving, winner = run(world)
    tried = {name for name, _ in world.log}
    untried = {name for name, state in halving.states.items() if state.out == "no time left to try it"}
    assert not tried & untried and len(world.log) == most
    if most == 0:
        assert winner is None and untried == set(halving.states)
    else:
        assert winner and winner.candidate.name in tried and not winner.measured
    if most == 2:
        assert untried >= {"w2", "half", "quarter", "ninth"}


def test_no_candidate_gains() -> None:
    slow = {name: (loss, 1.0) for name, (loss, _) in SCHEMES.items()}
    halving, winner = run(World(slow), slow)
    assert winner is None
    assert {halving.states[name].out for name in ("int8", "awq")} == {"gains nothing"}


def test_a_gain_that_the_measurement_refutes() -> None:
    """A finalist's measured gain counts, not what was predicted."""

    class Disappointing(World):
        def measured(self, candidates):
            return {candidate.name: 0.9 for candidate in candidates}

    halving, winner = run(Disappointing(SCHEMES | REDUCERS))
    assert winner is None and halving.states[BEST].gain == 0.9 and halving.states[BEST].out == "gains nothing"


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
    """Trials of this world say that nothing gains; what is known beforehand says otherwise, of combinations, too."""
    halving, winner = run(World(SCHEMES | REDUCERS, foreknown=True, measuring=False))
    assert winner and winner.candidate.name == BEST and winner.gain == pytest.approx(2.4)
    assert halving.states["int8 + half"].gain == pytest.approx(1.3 * 1.5)


def test_few_are_left_after_each_rung() -> None:
    many = {f"s{i}": (0.0, 1.1 + i / 100) for i in range(8)}, {f"r{i}": (0.0, 1.2 + i / 100) for i in range(9)}
    world = World(many[0] | many[1])
    halving, winner = run(world, *many)
    counts = [sum(questions == n for _, questions in world.log) for n in (48, 100, 300, 900)]
    assert counts == [17, halving.rules.joint, 4, halving.rules.finalists]
    assert len(halving.states) == 17 + 72 and winner and winner.candidate.name == "s7 + r8"


def test_an_unlikely_winner_needs_no_likelier_one() -> None:
    """Five times the speed at 1 chance in 4 is worth as much as twice at a certain one; who is likely wins all the same."""
    likely, not_so = (CandidateState(Candidate((Choice(name, {}),)), gain, chance=chance,
                               trial=Trial(Evidence([0.0], [0], None)))
                      for name, gain, chance in (("likely", 1.9, 0.99), ("unlikely", 5.0, 0.3)))  # fmt: skip
    halving = SuccessiveHalving([], World({}), RULES)
    assert not_so.score > likely.score
    assert halving._winner([not_so, likely]) is likely and not_so.out and not likely.out
    not_so.out = ""
    assert halving._winner([not_so]) is not_so


def test_one_survivor_in_four_is_a_safe_choice() -> None:
    """Long shots are worth most by their gain; the places 4 and 8 go to those that are sure to hold."""
    long = [CandidateState(Candidate((Choice(f"long {i}", {}),)), 10.0 + i, chance=0.4, least=0.0) for i in range(10)]
    sure = [
        CandidateState(Candidate((Choice(f"sure {i}", {}),)), 1.5 + i / 10, chance=0.99, least=0.98) for i in range(3)
    ]
    kept = SuccessiveHalving([], World({}), RULES)._best([*sure, *long], 8, "behind")
    assert {state.candidate.name for state in kept} == {*(f"long {i}" for i in range(4, 10)), "sure 1", "sure 2"}
    assert {state.out for state in [*sure, *long] if state not in kept} == {"behind"}

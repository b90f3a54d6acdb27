"""A race of candidates: all answer the same questions, those whose loss is refuted are out, and the best of the rest wins.

1. **Single changes.** Each scheme, each reducer and so on is asked the first few questions alone. The effect of two changes is
   predicted from that: differences add up, gains multiply. So a grid of 8 schemes and 12 reducers costs 20 trials.
2. **Rounds.** The best candidates are asked a ninth of the questions, the best of these a third, and the best of those all
   (`ROUNDS`). In place of those that fail or whose loss within the margin is refuted come the next best. Rounds are
   synchronous, so that the course of a race does not depend on the number of workers.
3. **Finalists** get their speed measured, and the best one wins.

The best candidate has the largest expected gain: its gain times the chance that a test on other questions confirms it, and the
original's gain of 1 otherwise. That chance, with the uncertainty of its loss in it, is the test's *assurance* (O'Hagan, Stevens
and Campbell, Pharmaceutical Statistics 4, 2005). Races: Maron and Moore, NIPS 1993.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vlmcompress.evaluation.accuracy import noninferiority
from vlmcompress.evaluation.accuracy.paired import NORMAL, MeanDifference
from vlmcompress.evaluation.search.candidate import Candidate, Factor, combined, singles

FIRST = 48
"""Number of questions for single changes."""
ROUNDS = ((9, 12), (3, 6), (1, 3))
"""The part of the questions that is asked in each round, and of how many candidates."""
ERROR = 0.025
"""One-sided error of every verdict, as in `vlmcompress eval`."""
VARY = 1.0
"""Standard deviation of a candidate's loss, as a share of that expected by its divergence. 0.2 to 0.46 was measured; in
simulated searches so much trust finds less where the divergence misleads, and hardly more elsewhere."""
_LEAST = 1e-6  # variance of a difference that no divergence shows: a tenth of a point
LIKELY = 0.45
"""Below this chance of confirmation, a candidate wins only if none has a higher one. Slightly below a half: with the minimum
number of images for a confirmation, the normal approximation gives 0.49 to a candidate that lost nothing."""


@dataclass(frozen=True)
class Estimate:
    """An estimate of a difference in accuracy, its variance, and the variance of one image's difference."""

    mean: float
    variance: float
    spread: float

    @classmethod
    def of(cls, difference: MeanDifference, margin: float) -> Estimate:
        """By a candidate's own answers, with variances as if its loss were the margin, so that one that lost none of 40
        questions is not taken for perfect."""
        loss = min(max(margin, -difference.mean), 1.0)
        # An image is lost or kept: the Bernoulli variance at the loss to be distinguished from the margin.
        spread = max(loss * (1 - loss), difference.variance(-margin))
        return cls(difference.mean, difference.variance(-margin) / difference.images, spread)

    def __add__(self, other: Estimate) -> Estimate:
        """The estimate of two changes at once: differences add up."""
        return Estimate(self.mean + other.mean, self.variance + other.variance, max(self.spread, other.spread))

    def assurance(self, margin: float, images: float | None) -> float:
        """The chance that a test will confirm a loss of at most `margin`.

        Args:
            images: their effective number in that test; None: no test follows, and the result is the chance of such a loss.
        """
        gap, unsure = self.mean + margin, self.variance
        if images is not None:
            noise = self.spread / images
            # The test passes if its estimate exceeds -margin by z standard errors.
            gap -= NORMAL.inv_cdf(1 - ERROR) * math.sqrt(noise)
            unsure += noise
        return NORMAL.cdf(gap / math.sqrt(max(unsure, 1e-12)))


@dataclass(frozen=True)
class Trial:
    """The result of a trial: a candidate's paired differences, or why there are none (`failed`).

    Attributes:
        divergence: mean divergence of the first token; None: the engine gives no probabilities.
        gain: the gain if `Trials.gain` is None.
    """

    difference: MeanDifference | None
    divergence: float | None = None
    gain: float = 1.0
    failed: str = ""


def estimates(trials: Mapping[str, Trial], margin: float) -> dict[str, Estimate]:
    """The estimate of each candidate with answers, by these and by its divergence.

    Losses grow with the divergence of the first token (KL of the original's distribution from the candidate's), which a few
    questions show better than lost answers do. So a loss is expected to be the divergence times a slope, that of all candidates
    together, with a deviation of `VARY` times that, and a candidate's own answers correct this: empirical Bayes.
    """
    of = {name: Estimate.of(trial.difference, margin) for name, trial in trials.items() if trial.difference}
    divergences = {name: moved for name in of if (moved := trials[name].divergence) is not None}
    lost, moved = -math.fsum(of[name].mean for name in divergences), math.fsum(divergences.values())
    if len(divergences) < 3 or lost <= 0 or moved <= 0:
        return of
    for name, divergence in divergences.items():
        alone, expected = of[name], divergence * lost / moved
        prior = (VARY * expected) ** 2 + _LEAST
        share = prior / (prior + alone.variance)
        of[name] = Estimate(share * alone.mean - (1 - share) * expected, share * alone.variance, alone.spread)
    return of


def refuted(difference: MeanDifference, margin: float, looks: int) -> bool:
    """Whether a loss of at most `margin` is refuted.

    A candidate is tested up to `looks` times, each time with an error of 0.025 / looks (Bonferroni), so that one within the
    margin is rejected with a probability of at most 0.025 overall.
    """
    return difference.mean < -margin and noninferiority.p_within(difference, margin) < ERROR / looks


class Trials(Protocol):
    """The interface for writing and evaluating checkpoints of candidates."""

    def ask(self, candidates: Sequence[Candidate], questions: int) -> Mapping[str, Trial]:
        """Ask each candidate the first `questions` questions, reusing earlier answers; name -> trial. Candidates for which no
        time is left are missing."""
        ...

    def gain(self, candidate: Candidate) -> float | None:
        """A candidate's gain without a trial; None: unknown."""
        ...

    def measured(self, candidates: Sequence[Candidate]) -> Mapping[str, float | str]:
        """Name -> measured gain of finalists, or why one could not be served; those for which no time is left are missing."""
        ...


@dataclass
class CandidateState:
    """A candidate's state in a race.

    Attributes:
        gain, chance: the latest values; `measured`: whether the gain was measured.
        estimate: of its difference; None: it was not tried, nor were all its parts.
        trial: its last trial; None: not tried.
        out: why it lost; empty for the winner and for remaining candidates.
    """

    candidate: Candidate
    gain: float
    estimate: Estimate | None = None
    chance: float = 0.0
    trial: Trial | None = None
    measured: bool = False
    out: str = ""

    @property
    def expected_gain(self) -> float:
        """`gain` (relative to the original) if it is confirmed, else 1."""
        return 1 + (self.gain - 1) * self.chance

    @property
    def questions(self) -> int:
        """Number of questions asked so far."""
        return self.trial.difference.n if self.trial and self.trial.difference else 0


@dataclass
class Race:
    """A race, run by `run`; `states` by name.

    Attributes:
        margin: the allowed loss of accuracy, as a share.
        questions: number of available questions; no candidate is asked more, as the original was not.
        confirming: the effective number of images of the confirmation; None: no confirmation.
        questions_asked: number of questions asked so far, of all candidates.
    """

    factors: Sequence[Factor]
    trials: Trials
    margin: float
    questions: int
    confirming: float | None = None
    states: dict[str, CandidateState] = field(default_factory=dict)
    questions_asked: int = 0

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Questions and candidates of each round after the single changes."""
        # At least twice the first look, so that a round is more informative than the single changes.
        least = min(2 * FIRST, self.questions)
        rounds = {max(self.questions // part, least): count for part, count in ROUNDS}
        return list(rounds.items())

    def run(self) -> CandidateState | None:
        """Run to the end. Returns the winner; None if no candidate is better than the original within the margin."""
        alone = [CandidateState(candidate, self._gain(candidate, 1.0)) for candidate in singles(self.factors)]
        self.states |= {state.candidate.name: state for state in alone}
        self._ask(alone, min(FIRST, self.questions))
        self._predict()
        entered, reason = list(self.states.values()), "predicted to be behind others"
        for questions, count in self.rounds:
            for _ in range(2):  # in place of those that are refuted come the next best
                best = self._ranked(entered)[:count]
                self._ask([state for state in best if state.questions < questions], questions)
            best = self._ranked(entered)[:count]
            for state in entered:
                if not state.out and state not in best:
                    state.out = reason if not state.questions else f"behind others after {state.questions:,} questions"
            entered = best
        for name, gain in self.trials.measured([state.candidate for state in entered]).items():
            if isinstance(gain, str):
                self.states[name].out = f"failed: {gain}"
            else:
                self.states[name].gain, self.states[name].measured = gain, True
        return self._winner(entered)

    def _gain(self, candidate: Candidate, otherwise: float) -> float:
        """A candidate's gain without a trial; `otherwise` where that is unknown."""
        return otherwise if (gain := self.trials.gain(candidate)) is None else gain

    def _ask(self, going: Sequence[CandidateState], questions: int) -> None:
        """Ask candidates, and remove those that failed or are refuted."""
        before = {state.candidate.name: state.questions for state in going}
        for name, trial in self.trials.ask([state.candidate for state in going], questions).items():
            state = self.states[name]
            state.trial = trial
            if trial.difference is None:
                state.out = f"failed: {trial.failed}"
                continue
            state.gain = self._gain(state.candidate, trial.gain)
            self.questions_asked += state.questions - before[name]
            if refuted(trial.difference, self.margin, 1 + len(self.rounds)):
                state.out = f"loses more than is allowed, by {state.questions:,} questions"
        for state in going:
            if state.trial is None:
                state.out = "no time left to try it"
        trials = {name: state.trial for name, state in self.states.items() if state.trial}
        for name, estimate in estimates(trials, self.margin).items():
            self.states[name].estimate = estimate
            self.states[name].chance = estimate.assurance(self.margin, self.confirming)

    def _predict(self) -> None:
        """Predict all combinations of single changes that are not out."""
        alone = {name: state for name, state in self.states.items() if not state.out and state.estimate}
        usable = [
            Factor(factor.name, tuple(choice for choice in factor.choices if choice.name in alone))
            for factor in self.factors
        ]
        for candidate in combined(usable):
            parts = [alone[choice.name] for choice in candidate.choices]
            gain = self._gain(candidate, math.prod(state.gain for state in parts))
            first, *others = (state.estimate for state in parts if state.estimate)
            estimate = sum(others, first)
            chance = estimate.assurance(self.margin, self.confirming)
            self.states[candidate.name] = CandidateState(candidate, gain, estimate, chance)

    def _ranked(self, going: Sequence[CandidateState]) -> list[CandidateState]:
        """The candidates that are not out, the best first; those without a gain are out."""
        for state in going:
            if not state.out and state.gain <= 1:
                state.out = "gains nothing"
        # By name where both are equal, so that the order never depends on chance.
        return sorted(
            (state for state in going if not state.out), key=lambda s: (-s.expected_gain, -s.gain, s.candidate.name)
        )

    def _winner(self, finalists: Sequence[CandidateState]) -> CandidateState | None:
        ranked = [state for state in self._ranked(finalists) if state.questions]
        winner = next((state for state in ranked if state.chance >= LIKELY), ranked[0] if ranked else None)
        for state in finalists:
            if state is not winner and not state.out:
                state.out = "behind the winner in the end"
        return winner

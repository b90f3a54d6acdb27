"""Successive halving: which candidates are asked how many questions, and which of them wins.

1. **Single changes.** Each scheme, each reducer and so on is asked a few dozen questions alone. The effect of two changes is
   predicted from that: differences add up, gains multiply. So a grid of 8 schemes and 12 reducers costs 20 trials.
2. **Rungs.** The best candidates (`posterior.expected_gain`) are asked a ninth, a third, and all of the questions, and after
   each rung a third of them continues: successive halving (Jamieson and Talwalkar, AISTATS 2016) with `ETA` 3. One place in
   four is for the best candidates under pessimistic posteriors (`CAUTIOUS`), so that not all places go to long shots. A
   candidate whose loss within the margin is refuted at any rung is out (`posterior.refuted`). Rungs are synchronous, so that
   the course of a search does not depend on the number of workers.
3. **Finalists** get their speed measured, and the best one wins.

`Trials` is the interface that writes checkpoints and asks questions, so that the same code runs on recorded answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vlmcompress.evaluation.search.candidate import Candidate, Factor, combined, singles
from vlmcompress.evaluation.search.posterior import Evidence, Posterior, assurance, expected_gain, posteriors, refuted

ETA = 3
FIRST = 48
"""Number of questions for single changes."""
JOINT = 12
"""Candidates of the first rung."""
FINALISTS = 3
CAUTIOUS = 4
"""One in this many places of a rung is ranked as if candidates lost a standard deviation more than expected."""
LIKELY = 0.45
"""Below this chance of confirmation, a candidate wins only if none has a higher one. Slightly below a half: with the minimum
number of images for a confirmation, the normal approximation gives 0.49 to a candidate that lost nothing."""


@dataclass(frozen=True)
class Rules:
    """The rules of successive halving.

    Attributes:
        margin: the allowed loss of accuracy, as a share.
        questions: number of available questions; no candidate is asked more, as the original was not.
        confirming: the effective number of images of the confirmation; None: no confirmation.
    """

    margin: float
    questions: int
    confirming: float | None = None
    first: int = FIRST
    joint: int = JOINT
    finalists: int = FINALISTS

    @property
    def rungs(self) -> list[int]:
        """Numbers of questions of the rungs after the single changes."""
        # At least twice the first look, so that a rung is more informative than the single changes.
        rungs = [max(self.questions // ETA**power, min(2 * self.first, self.questions)) for power in (2, 1, 0)]
        return sorted(set(rungs))

    @property
    def looks(self) -> int:
        """How often a candidate may be tested."""
        return 1 + len(self.rungs)


@dataclass(frozen=True)
class Trial:
    """The result of a trial: a candidate's answers, or why there are none (`failed`); the gain if `Trials.gain` is None."""

    evidence: Evidence | None
    gain: float = 1.0
    failed: str = ""


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
    """A candidate's state in successive halving.

    Attributes:
        gain, posterior, chance: the latest values; `measured`: whether the gain was measured.
        least: the chance if the loss is a standard deviation larger than expected.
        trial: its last trial; None: not tried.
        out: why it lost; empty for the winner and for remaining candidates.
    """

    candidate: Candidate
    gain: float
    posterior: Posterior | None = None
    chance: float = 0.0
    least: float = 0.0
    trial: Trial | None = None
    measured: bool = False
    out: str = ""

    @property
    def score(self) -> float:
        """See `posterior.expected_gain`."""
        return expected_gain(self.gain, self.chance)

    @property
    def questions(self) -> int:
        """Number of questions asked so far."""
        return len(self.trial.evidence.differences) if self.trial and self.trial.evidence else 0


@dataclass
class SuccessiveHalving:
    """Successive halving, run by `run`; `states` by name."""

    factors: Sequence[Factor]
    trials: Trials
    rules: Rules
    states: dict[str, CandidateState] = field(default_factory=dict)
    questions_asked: int = 0

    def run(self) -> CandidateState | None:
        """Run to the end. Returns the winner; None if no candidate is better than the original within the floor."""
        first = [CandidateState(candidate, self.trials.gain(candidate) or 1.0) for candidate in singles(self.factors)]
        self.states |= {state.candidate.name: state for state in first}
        self._ask(first, min(self.rules.first, self.rules.questions))
        going = self._joined()
        # Successive halving (Jamieson and Talwalkar, 2016): of each rung the best ETA-th goes on to ETA times the questions.
        for number, questions in enumerate(self.rules.rungs):
            self._ask(going, questions)
            last = number == len(self.rules.rungs) - 1
            keep = self.rules.finalists if last else max(math.ceil(len(going) / ETA), self.rules.finalists)
            going = self._best(going, keep, "behind others after {} questions")
        for name, gain in self.trials.measured([candidate.candidate for candidate in going]).items():
            if isinstance(gain, str):
                self.states[name].out = f"failed: {gain}"
            else:
                self.states[name].gain, self.states[name].measured = gain, True
        return self._winner([candidate for candidate in going if not candidate.out])

    def _ask(self, going: Sequence[CandidateState], questions: int) -> None:
        """Ask candidates, update the posteriors, and remove candidates that failed or are refuted."""
        before = {state.candidate.name: state.questions for state in going}
        for name, trial in self.trials.ask([state.candidate for state in going], questions).items():
            state = self.states[name]
            state.trial = trial
            if trial.failed:
                state.out = f"failed: {trial.failed}"
                continue
            state.gain = gain if (gain := self.trials.gain(state.candidate)) is not None else trial.gain
            self.questions_asked += state.questions - before[name]
            assert trial.evidence is not None
            if refuted(trial.evidence, self.rules.margin, self.rules.looks):
                state.out = f"loses more than is allowed, by {state.questions:,} questions"
        for state in going:
            if state.trial is None:
                state.out = "no time left to try it"
        tried = {name: state for name, state in self.states.items() if state.questions}
        evidence = {name: state.trial.evidence for name, state in tried.items() if state.trial and state.trial.evidence}
        for name, posterior in posteriors(evidence, self.rules.margin).items():
            self._judge(self.states[name], posterior, [evidence[name]])

    def _judge(self, state: CandidateState, posterior: Posterior, evidence: Sequence[Evidence]) -> None:
        """Set the posterior of a candidate, and its chances by its own answers or those of its parts."""
        worse = Posterior(posterior.mean - math.sqrt(posterior.variance), 0.0)
        state.posterior = posterior
        state.chance, state.least = (min(self.chance(some, of) for of in evidence) for some in (posterior, worse))

    def chance(self, posterior: Posterior, evidence: Evidence | None = None, margin: float | None = None) -> float:
        """The chance that a candidate with this posterior is confirmed. `margin`: replaces that of the rules."""
        margin = self.rules.margin if margin is None else margin
        loss = min(max(margin, -posterior.mean), 1.0)
        # An image is lost or kept: the Bernoulli variance at the loss to be distinguished from the margin.
        spread = loss * (1 - loss)  # of images that change one way only
        if evidence is not None:
            spread = max(spread, evidence.mean.variance(-margin))
        return assurance(posterior, margin, self.rules.confirming, spread)

    def _joined(self) -> list[CandidateState]:
        """The candidates of the first rung: single changes and what is predicted for all combinations of them."""
        alone = {name: state for name, state in self.states.items() if not state.out and state.posterior}
        usable = [
            Factor(factor.name, tuple(choice for choice in factor.choices if choice.name in alone))
            for factor in self.factors
        ]
        predicted = []
        for candidate in combined(usable):
            parts = [alone[choice.name] for choice in candidate.choices]
            # Independent changes: means and variances of the differences add up.
            posterior = sum((state.posterior for state in parts if state.posterior), Posterior(0.0, 0.0))
            gain = self.trials.gain(candidate) or math.prod(state.gain for state in parts)
            predicted.append(CandidateState(candidate, gain))
            self._judge(
                predicted[-1],
                posterior,
                [state.trial.evidence for state in parts if state.trial and state.trial.evidence],
            )
        self.states |= {state.candidate.name: state for state in predicted}
        return self._best([*alone.values(), *predicted], self.rules.joint, "predicted to be behind others")

    def _best(self, going: Sequence[CandidateState], keep: int, why: str) -> list[CandidateState]:
        """Keep the best candidates, and record `why` the others are out; its `{}` becomes the number of questions that a
        candidate was asked."""
        for state in going:
            if not state.out and state.gain <= 1:
                state.out = "gains nothing"
        ranked = sorted((state for state in going if not state.out), key=_rank)
        safe = sorted(ranked, key=lambda state: -expected_gain(state.gain, state.least))
        kept: set[str] = set()
        while len(kept) < min(keep, len(ranked)):
            order = ranked if (len(kept) + 1) % CAUTIOUS else safe
            kept.add(next(state.candidate.name for state in order if state.candidate.name not in kept))
        for state in ranked:
            if state.candidate.name not in kept:
                state.out = why.format(f"{state.questions:,}")
        return [state for state in ranked if not state.out]

    def _winner(self, going: Sequence[CandidateState]) -> CandidateState | None:
        ranked = sorted((state for state in going if state.gain > 1 and state.questions), key=_rank)
        likely = [state for state in ranked if state.chance >= LIKELY]
        winner = next(iter(likely or ranked), None)
        for state in going:
            if state is not winner:
                state.out = "gains nothing" if state.gain <= 1 else "behind the winner in the end"
        return winner


def _rank(state: CandidateState) -> tuple[float, float, str]:
    """Sort by worth, then by gain; by name where both are equal, so that the order never depends on chance."""
    return -state.score, -state.gain, state.candidate.name

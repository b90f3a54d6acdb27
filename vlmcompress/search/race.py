"""The race: which candidates are asked how many questions, and which of them wins.

1. **Single changes.** Each scheme, each reducer and so on is asked a few dozen questions alone. What two changes do together is
   predicted from that: differences add up, gains multiply. So a grid of 8 schemes and 12 reducers costs 20 trials.
2. **Rungs.** The candidates that are worth most (`belief.worth`) are asked a ninth, a third, and all of the questions, and
   after each rung a third of them goes on: successive halving (Jamieson and Talwalkar, AISTATS 2016) with `ETA` 3. One place
   in four is for those that are worth most if beliefs are too good (`CAUTIOUS`), lest all places go to long shots. A candidate
   whose loss is refuted at any of these looks is out (`belief.refuted`). Rungs are synchronous, so that the course of a
   search does not depend on how many workers do the trials.
3. **Finalists** get their speed measured, and the one that is worth most wins.

What makes checkpoints and asks questions is behind `Trials`, so that the same race runs on recorded answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vlmcompress.search.belief import Belief, Evidence, assurance, beliefs, refuted, worth
from vlmcompress.search.candidate import Candidate, Factor, combined, singles

ETA = 3
FIRST = 48
"""Questions that single changes are asked."""
JOINT = 12
"""Candidates of the first rung."""
FINALISTS = 3
CAUTIOUS = 4
"""One in so many places of a rung goes by what a candidate is worth if it loses a standard deviation more than believed."""
LIKELY = 0.45
"""The chance of being confirmed below which a candidate only wins where none has more. A little below a half: with the fewest
images that can confirm anything, one that lost nothing is given 0.49, as the chance is by a normal approximation."""


@dataclass(frozen=True)
class Rules:
    """What a race is run by.

    Attributes:
        margin: the allowed loss of accuracy, as a share.
        questions: how many there are to ask.
        confirming: the effective number of images that the winner will be confirmed on; None: it will not be.
    """

    margin: float
    questions: int
    confirming: float | None = None
    first: int = FIRST
    joint: int = JOINT
    finalists: int = FINALISTS

    @property
    def rungs(self) -> list[int]:
        """Questions of the rungs behind the single changes."""
        found = [max(self.questions // ETA**power, min(2 * self.first, self.questions)) for power in (2, 1, 0)]
        return sorted(set(found))

    @property
    def looks(self) -> int:
        """How often a candidate may be judged."""
        return 1 + len(self.rungs)


@dataclass(frozen=True)
class Trial:
    """What a trial found: a candidate's answers, or why there are none (`failed`); the gain where `Trials.gain` knows none."""

    evidence: Evidence | None
    gain: float = 1.0
    failed: str = ""


class Trials(Protocol):
    """What makes checkpoints of candidates and asks them."""

    def ask(self, candidates: Sequence[Candidate], questions: int) -> Mapping[str, Trial]:
        """Ask each candidate so many questions, those that it was asked before included; by name. Candidates that there is
        no time for are left out."""
        ...

    def gain(self, candidate: Candidate) -> float | None:
        """Say a candidate's gain without a trial; None where that cannot be known."""
        ...

    def measured(self, candidates: Sequence[Candidate]) -> Mapping[str, float | str]:
        """Measure the gains of finalists, or say why one could not be served; those that there is no time for are left out."""
        ...


@dataclass
class Standing:
    """A candidate's place in the race.

    Attributes:
        gain, belief, chance: as they are known last; `measured`: whether the gain was measured as finalists' are.
        least: the chance if the loss is a standard deviation larger than believed.
        trial: its last trial; None where it was not tried.
        out: why it lost; empty for the winner and while it is in.
    """

    candidate: Candidate
    gain: float
    belief: Belief | None = None
    chance: float = 0.0
    least: float = 0.0
    trial: Trial | None = None
    measured: bool = False
    out: str = ""

    @property
    def worth(self) -> float:
        """See `belief.worth`."""
        return worth(self.gain, self.chance)

    @property
    def questions(self) -> int:
        """How many questions it was asked."""
        return len(self.trial.evidence.differences) if self.trial and self.trial.evidence else 0


@dataclass
class Race:
    """A race, run by `run`; `standings` by name."""

    factors: Sequence[Factor]
    trials: Trials
    rules: Rules
    standings: dict[str, Standing] = field(default_factory=dict)
    asked: int = 0

    def run(self) -> Standing | None:
        """Run the race to its end. Returns the winner; None where no candidate is better than the original within the floor."""
        first = [Standing(one, self.trials.gain(one) or 1.0) for one in singles(self.factors)]
        self._enter(first)
        self._ask(first, self.rules.first)
        going = self._joined()
        for number, questions in enumerate(self.rules.rungs):
            self._ask(going, questions)
            last = number == len(self.rules.rungs) - 1
            keep = self.rules.finalists if last else max(math.ceil(len(going) / ETA), self.rules.finalists)
            going = self._best(going, keep, "behind others after {} questions")
        for name, gain in self.trials.measured([one.candidate for one in going]).items():
            if isinstance(gain, str):
                self.standings[name].out = f"failed: {gain}"
            else:
                self.standings[name].gain, self.standings[name].measured = gain, True
        return self._winner([one for one in going if not one.out])

    def _enter(self, new: Sequence[Standing]) -> None:
        self.standings |= {one.candidate.name: one for one in new}

    def _ask(self, going: Sequence[Standing], questions: int) -> None:
        """Ask candidates, form beliefs anew, and put those out that failed or are refuted."""
        before = {one.candidate.name: one.questions for one in going}
        for name, trial in self.trials.ask([one.candidate for one in going], questions).items():
            one = self.standings[name]
            one.trial = trial
            if trial.failed:
                one.out = f"failed: {trial.failed}"
                continue
            one.gain = known if (known := self.trials.gain(one.candidate)) is not None else trial.gain
            self.asked += one.questions - before[name]
            assert trial.evidence is not None
            if refuted(trial.evidence, self.rules.margin, self.rules.looks):
                one.out = f"loses more than is allowed, by {one.questions:,} questions"
        for one in going:
            if one.trial is None:
                one.out = "no time left to try it"
        self._believe()

    def _believe(self) -> None:
        tried = {name: one for name, one in self.standings.items() if one.questions}
        evidence = {name: one.trial.evidence for name, one in tried.items() if one.trial and one.trial.evidence}
        for name, belief in beliefs(evidence, self.rules.margin).items():
            self._judge(self.standings[name], belief, [evidence[name]])

    def _judge(self, one: Standing, belief: Belief, seen: Sequence[Evidence]) -> None:
        """Set what is believed of a candidate by the answers of its own or of its parts."""
        worse = Belief(belief.mean - math.sqrt(belief.variance), 0.0)
        one.belief = belief
        one.chance, one.least = (min(self.chance(some, of) for of in seen) for some in (belief, worse))

    def chance(self, belief: Belief, evidence: Evidence | None = None, margin: float | None = None) -> float:
        """The chance that a candidate of such a belief is confirmed. `margin`: another than the race's."""
        margin = self.rules.margin if margin is None else margin
        loss = min(max(margin, -belief.mean), 1.0)
        spread = loss * (1 - loss)  # of images that change one way only
        if evidence is not None:
            spread = max(spread, evidence.mean.variance(-margin))
        return assurance(belief, margin, self.rules.confirming, spread)

    def _joined(self) -> list[Standing]:
        """The candidates of the first rung: single changes and what is predicted for all combinations of them."""
        alone = {name: one for name, one in self.standings.items() if not one.out and one.belief}
        usable = [
            Factor(factor.name, tuple(choice for choice in factor.choices if choice.name in alone))
            for factor in self.factors
        ]
        predicted = []
        for candidate in combined(usable):
            parts = [alone[choice.name] for choice in candidate.choices]
            belief = sum((one.belief for one in parts if one.belief), Belief(0.0, 0.0))
            gain = self.trials.gain(candidate) or math.prod(one.gain for one in parts)
            predicted.append(Standing(candidate, gain))
            self._judge(
                predicted[-1], belief, [one.trial.evidence for one in parts if one.trial and one.trial.evidence]
            )
        self._enter(predicted)
        return self._best([*alone.values(), *predicted], self.rules.joint, "predicted to be behind others")

    def _best(self, going: Sequence[Standing], keep: int, why: str) -> list[Standing]:
        """Keep the candidates that are worth most, and note `why` the others are out; its `{}` is the number of questions that
        a candidate was asked."""
        for one in going:
            if not one.out and one.gain <= 1:
                one.out = "gains nothing"
        ranked = sorted((one for one in going if not one.out), key=_rank)
        safe = sorted(ranked, key=lambda one: -worth(one.gain, one.least))
        kept: set[str] = set()
        while len(kept) < min(keep, len(ranked)):
            order = ranked if (len(kept) + 1) % CAUTIOUS else safe
            kept.add(next(one.candidate.name for one in order if one.candidate.name not in kept))
        for one in ranked:
            if one.candidate.name not in kept:
                one.out = why.format(f"{one.questions:,}")
        return [one for one in ranked if not one.out]

    def _winner(self, going: Sequence[Standing]) -> Standing | None:
        ranked = sorted((one for one in going if one.gain > 1 and one.questions), key=_rank)
        likely = [one for one in ranked if one.chance >= LIKELY]
        winner = next(iter(likely or ranked), None)
        for one in going:
            if one is not winner:
                one.out = "gains nothing" if one.gain <= 1 else "behind the winner in the end"
        return winner


def _rank(one: Standing) -> tuple[float, float, str]:
    """Sort by worth, then by gain; by name where both are equal, so that the order never depends on chance."""
    return -one.worth, -one.gain, one.candidate.name

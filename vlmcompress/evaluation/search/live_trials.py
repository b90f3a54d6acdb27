"""Trials on real checkpoints and a real engine, and the speed of finalists."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmcompress.evaluation.accuracy.compare import first_token_divergence
from vlmcompress.evaluation.accuracy.free_answers import Score
from vlmcompress.evaluation.accuracy.scoring import normalise
from vlmcompress.evaluation.results import Ratio
from vlmcompress.evaluation.search.candidate import Candidate
from vlmcompress.evaluation.search.racing import Evidence, Trial
from vlmcompress.evaluation.search.speed import Measured, Modelled
from vlmcompress.evaluation.search.trial import Answers, Setup, evaluate_candidate
from vlmcompress.evaluation.search.trial_log import TrialLog
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent
from vlmcompress.utils.workers import Failed, Workers

SHARE = 0.25
"""Minimum share of a time budget that is reserved for the finalists' speed and the confirmation."""


@dataclass
class LiveTrials:
    """Trials on real checkpoints, for a `Race`.

    Attributes:
        score: how answers to plain data are scored, chosen by the original's answers; None: by the suite.
        reserve: seconds of the budget that are reserved for the steps after the trials.
    """

    setup: Setup
    crew: Workers
    log: TrialLog
    gains: Measured | Modelled
    original: Answers
    score: Score | None = None
    progress: Progress = silent
    reserve: float = 0.0
    late: bool = False
    _took: list[float] = field(default_factory=list)

    def ask(self, candidates: Sequence[Candidate], questions: int) -> dict[str, Trial]:
        """See `racing.Trials`: trials that the log has are taken from it."""
        rows = {candidate.name: self.log.trial(candidate, questions) for candidate in candidates}
        jobs = [candidate for candidate in candidates if rows[candidate.name] is None]
        label = f"asking {questions:,} questions"
        work = functools.partial(evaluate_candidate, self.setup, questions=questions)
        began, results = time.monotonic(), self.crew.map(work, jobs)
        for done in range(len(jobs)):
            usual = statistics.median(self._took) if self._took else 0.0
            if self.log.left < usual + self.reserve:  # another trial would use the reserve
                self.late = True
                break
            self.progress(label, done, len(jobs))
            number, answers = next(results)
            if isinstance(answers, Failed) and answers.unwritten:  # the candidate is not at fault; the log would say so
                raise UserError(answers.reason)
            self._took.append((time.monotonic() - began) / (done + 1))
            rows[jobs[number].name] = answered = self._row(answers)
            self.log.write(jobs[number], questions, answered)
        results.close()
        return {name: self._trial(row) for name, row in rows.items() if row is not None}

    def gain(self, candidate: Candidate) -> float | None:
        """See `racing.Trials`."""
        return self.gains.gain(candidate)

    def measured(self, candidates: Sequence[Candidate]) -> dict[str, float | str]:
        """See `racing.Trials`: one after the other on this machine, whoever the workers are."""
        if isinstance(self.gains, Modelled):
            return {}
        gains: dict[str, float | str] = {}
        took = 0.0  # seconds of the last one
        for done, candidate in enumerate(candidates):
            key = f"speed {self.gains.goal} {candidate.folder}"
            if (measured := self.log.note(key)) is None:
                # At least one finalist is measured; the confirmation needs most of the reserve.
                if self.log.left < (0.6 * self.reserve + took if gains else 0.0):
                    self.late = True
                    break
                began = time.monotonic()
                self.progress("measuring the speed of finalists", done, len(candidates))
                try:
                    measured = self.gains.measure(candidate, self.progress).model_dump()
                except UserError as error:
                    measured = str(error)
                took = time.monotonic() - began
                self.log.keep(key, measured)
            if isinstance(measured, dict):
                measured = Ratio(**measured).gain
            gains[candidate.name] = measured
        return gains

    def _row(self, answers: Answers | Failed) -> dict[str, Any]:
        """The log's entry of a trial."""
        if isinstance(answers, Failed):
            return {"failed": answers.reason}
        before = {sample.id: sample for sample in self.original.suite.samples}
        after = (self.score.applied(answers.suite) if self.score else answers.suite).samples
        pairs = [(before[sample.id], sample) for sample in after]
        moved, _ = first_token_divergence(
            [old.answer.first for old, _ in pairs], [new.answer.first for _, new in pairs]
        )
        same = sum(normalise(old.text) == normalise(new.text) for old, new in pairs)
        return {
            "scores": {sample.id: sample.score for sample in after},
            "divergence": moved.mean if moved else None,
            "agreement": same / len(pairs),
            "seconds": answers.seconds,
            "weight_bytes": answers.weight_bytes,
            "prompt_tokens": answers.tokens,
        }

    def _trial(self, row: Mapping[str, Any]) -> Trial:
        if row.get("failed"):
            return Trial(None, failed=row["failed"])
        before = {sample.id: sample for sample in self.original.suite.samples}
        differences = [score - before[name].score for name, score in row["scores"].items()]
        evidence = Evidence(differences, [before[name].image for name in row["scores"]], row["divergence"])
        return Trial(evidence, self.original.tokens / row["prompt_tokens"])


def original(setup: Setup, questions: int, crew: Workers, log: TrialLog, progress: Progress) -> Answers:
    """Ask the original all `questions` of the search. Raises UserError where that fails, as nothing can be compared then."""
    progress("asking the original", 0, 1)
    _, answers = next(crew.map(functools.partial(evaluate_candidate, setup, questions=questions), [Candidate()]))
    if isinstance(answers, Failed):
        raise UserError(f"the original cannot be asked: {answers.reason}")
    if answers.seconds is not None:
        log.keep("seconds", answers.seconds)
    return answers

"""Trials on real checkpoints and a real engine, and the speed of finalists."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmcompress.evaluation.accuracy.ask import SuiteAnswers
from vlmcompress.evaluation.accuracy.compare import first_token_divergence
from vlmcompress.evaluation.accuracy.free_answers import Score
from vlmcompress.evaluation.accuracy.paired import MeanDifference
from vlmcompress.evaluation.search.candidate import Candidate
from vlmcompress.evaluation.search.racing import Trial
from vlmcompress.evaluation.search.speed import Measured, Modelled
from vlmcompress.evaluation.search.trial import Setup, evaluate_candidate
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
        late: whether the budget ended the trials.
    """

    setup: Setup
    crew: Workers
    log: TrialLog
    gains: Measured | Modelled
    original: SuiteAnswers
    score: Score | None = None
    progress: Progress = silent
    reserve: float = 0.0
    late: bool = False
    _took: list[float] = field(default_factory=list)

    def ask(self, candidates: Sequence[Candidate], questions: int) -> dict[str, Trial]:
        """See `racing.Trials`: trials that the log has are taken from it."""
        rows = {candidate.name: self.log.trial(candidate, questions) for candidate in candidates}
        jobs = [candidate for candidate in candidates if rows[candidate.name] is None]
        work = functools.partial(evaluate_candidate, self.setup, questions=questions)
        began, results = time.monotonic(), self.crew.map(work, jobs)
        for done in range(len(jobs)):
            usual = statistics.median(self._took) if self._took else 0.0
            if self.log.left < usual + self.reserve:  # another trial would use the reserve
                self.late = True
                break
            self.progress(f"asking {questions:,} questions", done, len(jobs))
            number, answers = next(results)
            self._took.append((time.monotonic() - began) / (done + 1))
            if not isinstance(answers, Failed):
                row = self._row(answers)
            elif answers.unwritten:  # the candidate is not at fault; the log would say so
                raise UserError(answers.reason)
            else:
                row = {"failed": answers.reason}
            self.log.write(jobs[number], questions, row)
            rows[jobs[number].name] = row
        results.close()
        return {name: self._trial(row) for name, row in rows.items() if row is not None}

    def _row(self, answers: SuiteAnswers) -> dict[str, Any]:
        """The log's entry of a trial."""
        before = {sample.id: sample.answer for sample in self.original.samples}
        samples = (self.score.applied(answers) if self.score else answers).samples
        moved, _ = first_token_divergence(
            [before[sample.id].first for sample in samples], [sample.answer.first for sample in samples]
        )
        return {
            "scores": {sample.id: sample.score for sample in samples},
            "divergence": moved.mean if moved else None,
            "prompt_tokens": answers.prompt_tokens,
        }

    def _trial(self, row: Mapping[str, Any]) -> Trial:
        """The trial of a row in the log."""
        if "failed" in row:
            return Trial(None, failed=row["failed"])
        before = {sample.id: sample for sample in self.original.samples}
        differences = [score - before[name].score for name, score in row["scores"].items()]
        images = [before[name].image for name in row["scores"]]
        gain = self.original.prompt_tokens / row["prompt_tokens"]
        return Trial(MeanDifference(differences, images), row["divergence"], gain)

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
            if (gain := self.log.note(key)) is None:
                # At least one finalist is measured; the confirmation needs most of the reserve.
                if self.log.left < (0.6 * self.reserve + took if gains else 0.0):
                    self.late = True
                    break
                began = time.monotonic()
                self.progress("measuring the speed of finalists", done, len(candidates))
                try:
                    gain = self.gains.measure(candidate, self.progress)
                except UserError as error:
                    gain = str(error)
                took = time.monotonic() - began
                self.log.keep(key, gain)
            gains[candidate.name] = gain
        return gains


def original(setup: Setup, questions: int, crew: Workers, log: TrialLog, progress: Progress) -> SuiteAnswers:
    """Ask the original all `questions` of the search. Raises UserError where that fails, as nothing can be compared then."""
    progress("asking the original", 0, 1)
    _, answers = next(crew.map(functools.partial(evaluate_candidate, setup, questions=questions), [Candidate()]))
    if isinstance(answers, Failed):
        raise UserError(f"the original cannot be asked: {answers.reason}")
    if new := len(answers.samples) - answers.resumed:
        log.keep("seconds", answers.seconds / new)
    return answers

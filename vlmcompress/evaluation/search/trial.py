"""A trial: write a candidate's checkpoint, and ask it and the original questions.

All files of trials are in a work folder, under names that identify their content: checkpoints, and answers as they arrive. So
nothing is computed twice, even after a kill, and two processes can share the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress import engines
from vlmcompress.engines import EngineSettings
from vlmcompress.evaluation.accuracy import tasks
from vlmcompress.evaluation.accuracy.accuracy import FIRST_TOKENS
from vlmcompress.evaluation.accuracy.ask import SuiteAnswers, ask_suite
from vlmcompress.evaluation.search.candidate import Candidate
from vlmcompress.models.data import Reading
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils import folders, locks
from vlmcompress.utils.progress import Progress, silent
from vlmcompress.utils.work_folder import OtherWork, open_journal


@dataclass(frozen=True)
class Setup:
    """The common settings of all trials of a search.

    Attributes:
        base: recipe keys of all candidates.
        suite, data: the questions, as for `vlmcompress eval`; `seed` decides their order.
        engine: name of the engine that answers, on the machine of the trial.
        work: the work folder.
    """

    base: Mapping[str, Any]
    suite: str | None
    data: str | None
    seed: int
    engine: str
    work: Path

    @property
    def model(self) -> Path:
        """Folder of the original."""
        return Path(self.base["model"])

    @property
    def reading(self) -> Reading:
        """How rows are read, for calibration data and questions."""
        settings = self.base.get("calibrate", {})
        return Reading(settings.get("columns", {}), settings.get("skip_bad", 0))


def evaluate_candidate(setup: Setup, candidate: Candidate, questions: int, progress: Progress = silent) -> SuiteAnswers:
    """Write a candidate's checkpoint, unless it exists, and ask it the first `questions` questions.

    Answers in its journal are reused.

    Raises:
        UserError: the checkpoint cannot be written, or the engine fails.
    """
    with folders.user_errors(setup.work):
        setup.work.mkdir(parents=True, exist_ok=True)
    folder, suite = ensure_checkpoint(setup, candidate, progress), questions_of(setup, questions)
    engine, settings = engines.get_engine(setup.engine), EngineSettings(logprobs=FIRST_TOKENS, seed=setup.seed)
    with open_journal(setup.work / f"answers-{candidate.folder}.jsonl") as journal:
        return ask_suite(folder, suite, engine, settings, journal, progress, candidate.name)


def questions_of(setup: Setup, count: int | None) -> tasks.LoadedSuite:
    """Load the first `count` questions of a search, in the order of its seed; None: all."""
    model, data = setup.model, Path(setup.data) if setup.data else None
    options: dict[str, Any] = {"limit": count, "seed": setup.seed, "reading": setup.reading}
    return tasks.load_suite(setup.suite, data, candidate=model, baseline=model, **options)


def ensure_checkpoint(setup: Setup, candidate: Candidate, progress: Progress = silent) -> Path:
    """The folder of a candidate's checkpoint, which one process writes if it is missing while others wait for it.

    If a worker with other versions or threads left it unfinished, it is started over, as it belongs to the search.
    """
    if not candidate.choices:
        return setup.model
    folder = setup.work / f"checkpoint-{candidate.folder}"
    turn = locks.held(folders.staging_path(folder, "turn"), f"making {folder}", wait=True)
    with folders.user_errors(folder), turn:
        if not folder.exists():
            recipe = resolve({**setup.base, **candidate.keys, "out": str(folder)}).recipe
            try:
                quantize(recipe, progress=progress)
            except OtherWork:
                quantize(recipe, restart=True, progress=progress)
    return folder

"""The log of a search: every trial, each on disk before the next begins, and the time spent.

`search.jsonl` is a journal (`utils.work_folder`), so that a killed search can resume. Trials depend on the model, the data, the
seed and the engine, but not on floor and objective: another search in the same folder, with another floor, reuses them.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmcompress.evaluation.search.candidate import Candidate
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import is_leftover
from vlmcompress.utils.work_folder import Journal, open_journal

NAME, CONFIRMED = "search.jsonl", "confirm.jsonl"
"""Journals in the folder of a search: of trials, and of the answers for the winner's confirmation."""
WORK, QUESTIONS = "work", "questions"
"""Folders of a search: intermediate results, and the questions that were made of images."""
SOURCES = "sources.json"
"""File in `QUESTIONS` that records their origin: hashes of the model and the images, and the prompts."""
_ABOUT, _SPENT = "about", "spent"


class TrialLog:
    """The trials of a search, and its clock; use `open_trial_log`."""

    def __init__(self, journal: Journal, budget: float | None):
        self._journal, self._budget = journal, budget
        self._before, self._began = float(journal.read(_SPENT) or 0.0), time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds that the search has taken, including interrupted runs."""
        return self._before + time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Remaining seconds of the budget."""
        return float("inf") if self._budget is None else self._budget - self.spent

    def trial(self, candidate: Candidate, questions: int) -> dict[str, Any] | None:
        """The result of a trial, or None."""
        return self._journal.read(f"trial {candidate.folder} {questions}")

    def write(self, candidate: Candidate, questions: int, outcome: Mapping[str, Any]) -> None:
        """Write the result of a trial, and the time."""
        self._journal.write(f"trial {candidate.folder} {questions}", {"name": candidate.name, **outcome})
        self._journal.write(_SPENT, round(self.spent, 1))

    def note(self, key: str) -> Any:
        """A note's value, or None."""
        return self._journal.read(f"note {key}")

    def keep(self, key: str, value: Any) -> None:
        """Write a note, and the time."""
        self._journal.write(f"note {key}", value)
        self._journal.write(_SPENT, round(self.spent, 1))

    def finish(self) -> None:
        """Reset the clock, for later searches in this folder."""
        self._journal.write(_SPENT, 0.0)


def clear(folder: Path) -> None:
    """Delete a search's unfinished work in its folder: trials, questions, answers and intermediate results."""
    if (folder / NAME).is_file() or (folder / QUESTIONS / SOURCES).is_file():
        for name in (NAME, CONFIRMED):
            (folder / name).unlink(missing_ok=True)
        for name in (WORK, QUESTIONS):
            shutil.rmtree(folder / name, ignore_errors=True)


@contextlib.contextmanager
def open_trial_log(folder: Path, about: Mapping[str, Any], budget: float | None) -> Iterator[TrialLog]:
    """Open or create the log of a search.

    Args:
        about: the inputs of its trials, those that decide others first.
        budget: seconds that the search may take; None: no limit.

    Raises:
        UserError: the folder has other files, or a search with other inputs.
    """
    file = folder / NAME
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder} exists and is not a folder; choose another one")
    paths = folder.iterdir() if folder.is_dir() else ()
    others = [path for path in paths if path.name not in (WORK, QUESTIONS) and not is_leftover(path)]
    if others and not file.is_file():
        raise UserError(f"output {folder} has files that do not belong to a search; choose another folder")
    with open_journal(file) as journal:
        before = journal.read(_ABOUT)
        if before is None:
            journal.write(_ABOUT, dict(about))
        elif changed := [key for key in {**about, **before} if before.get(key) != about.get(key)]:
            raise UserError(
                f"output {folder} has a search with another {changed[0]}; choose another folder, or begin anew with --restart"
            )
        yield TrialLog(journal, budget)

"""The log of a search: every trial, each on disk before the next begins, and the time that was spent.

`search.jsonl` is a journal (`utils.work_folder`), so a search that was killed goes on where it was. Trials depend
on the model, the data, the seed and the engine, and on no floor and no objective: another search in the same folder, with
another floor, takes up all that is known.
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
from vlmcompress.utils.work_folder import Journal, open_journal

NAME, CONFIRMED = "search.jsonl", "confirm.jsonl"
"""Journals in the folder of a search: of trials, and of answers to the questions that confirm the winner."""
WORK, QUESTIONS = "work", "questions"
"""Folders there: what is made on the way, and questions that `auto` wrote."""
SOURCES = "sources.json"
"""File in `QUESTIONS` that says what these are made of: hashes of the model and the images, and the prompts."""
_ABOUT, _SPENT = "about", "spent"


class TrialLog:
    """The trials of a search, and its clock; use `open_trial_log`."""

    def __init__(self, journal: Journal, budget: float | None):
        self._journal, self._budget = journal, budget
        self._before, self._began = float(journal.read(_SPENT) or 0.0), time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds that the search has taken, runs that were interrupted included."""
        return self._before + time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left of the budget."""
        return float("inf") if self._budget is None else self._budget - self.spent

    def trial(self, candidate: Candidate, questions: int) -> dict[str, Any] | None:
        """Read what a trial found; None where there was none."""
        return self._journal.read(f"trial {candidate.folder} {questions}")

    def write(self, candidate: Candidate, questions: int, outcome: Mapping[str, Any]) -> None:
        """Note what a trial found, and the time."""
        self._journal.write(f"trial {candidate.folder} {questions}", {"name": candidate.name, **outcome})
        self._journal.write(_SPENT, round(self.spent, 1))

    def note(self, key: str) -> Any:
        """Read a note; None where there is none."""
        return self._journal.read(f"note {key}")

    def keep(self, key: str, value: Any) -> None:
        """Write a note, and the time."""
        self._journal.write(f"note {key}", value)
        self._journal.write(_SPENT, round(self.spent, 1))

    def finish(self) -> None:
        """Set the clock back: what is searched in this folder later is another search."""
        self._journal.write(_SPENT, 0.0)


def clear(folder: Path) -> None:
    """Delete what a search left in its folder to go on with: trials, questions, answers, and what was made on the way."""
    if (folder / NAME).is_file() or (folder / QUESTIONS / SOURCES).is_file():
        for name in (NAME, CONFIRMED):
            (folder / name).unlink(missing_ok=True)
        for name in (WORK, QUESTIONS):
            shutil.rmtree(folder / name, ignore_errors=True)


@contextlib.contextmanager
def open_trial_log(folder: Path, about: Mapping[str, Any], budget: float | None) -> Iterator[TrialLog]:
    """Open the log of a search, or begin one.

    Args:
        about: what trials depend on.
        budget: seconds that the search may take; None: no limit.

    Raises:
        UserError: the folder has something else in it, or a search of something else.
    """
    file = folder / NAME
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder} exists and is not a folder; choose another one")
    others = [path for path in folder.iterdir() if path.name not in (WORK, QUESTIONS)] if folder.is_dir() else []
    if others and not file.is_file():
        raise UserError(f"output {folder} has files that are of no search; choose another folder")
    with open_journal(file) as journal:
        before = journal.read(_ABOUT)
        if before is None:
            journal.write(_ABOUT, dict(about))
        elif changed := _changed(before, about):
            what = ", ".join(changed)
            raise UserError(
                f"output {folder} has a search with another {what}; choose another folder, or begin anew with --restart"
            )
        yield TrialLog(journal, budget)


def _changed(before: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """Name what differs. Another seed or number of questions chooses other samples, whose hashes then say nothing more."""
    changed = [key for key in {**before, **about} if before.get(key) != about.get(key)]
    chosen = {"seed": {"data", "calibration"}, "questions": {"data"}}
    explained = set().union(*(keys for key, keys in chosen.items() if key in changed))
    return [key for key in changed if key not in explained]

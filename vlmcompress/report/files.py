"""Write a report: everything is made before anything is written, and no file is ever half there."""

from __future__ import annotations

from pathlib import Path

from vlmcompress.common.folders import dump, save
from vlmcompress.errors import UserError
from vlmcompress.report.badge import badge
from vlmcompress.report.junit import junit
from vlmcompress.report.markdown import markdown
from vlmcompress.report.page import page
from vlmcompress.results import FILE, Results, Side, load

JOURNAL = "answers.jsonl"
"""Answers as they come, kept in the folder of a report by `vlmcompress eval`, so that a killed run can go on."""


def refuse_foreign(folder: Path, mark: str = FILE, unfinished: str = JOURNAL) -> None:
    """Raise `UserError` if `folder` holds files and none called `mark`, by which a report is known as ours to replace.

    Args:
        unfinished: a file that may be there alone.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names - {unfinished} and mark not in names:
        raise UserError(f"output {folder} has no {mark}, so it is not ours to overwrite; choose another folder")


def check(folder: Path, baseline: Side, candidate: Side, *, overwrite: bool) -> None:
    """Refuse a folder that a report on `candidate` against `baseline` must not replace. Call it before any work.

    Args:
        overwrite: a report of other checkpoints may be replaced.

    Raises:
        UserError: the folder has files and is no report, or has the report of other checkpoints.
    """
    refuse_foreign(folder)
    if overwrite or not (folder / FILE).is_file():
        return
    earlier = load(folder)
    if earlier.identity() != [baseline.identity(), candidate.identity()]:
        about = f"{earlier.candidate.name} against {earlier.baseline.name}"
        same_names = (earlier.candidate.name, earlier.baseline.name) == (candidate.name, baseline.name)
        other = f"{about}, of other weights" if same_names else about
        raise UserError(f"output {folder} has the report of {other}; choose another folder or pass --overwrite")


def write(results: Results, folder: str | Path) -> dict[str, Path]:
    """Write a report into `folder`: made if missing, older files replaced, each whole or not at all.

    Returns:
        kind ("json", "md", "html", "junit", "badge") -> file.

    Raises:
        UserError: the folder can't be written.
    """
    return save(
        folder,
        {
            "json": (FILE, dump(results.to_dict())),
            "md": ("report.md", markdown(results)),
            "html": ("report.html", page(results)),
            "junit": ("junit.xml", junit(results)),
            "badge": ("badge.json", dump(badge(results))),
        },
    )

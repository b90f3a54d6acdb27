"""Write a report: everything is made before anything is written, and no file is ever half there."""

from __future__ import annotations

from pathlib import Path

from vlmcompress.common.folders import dump, save
from vlmcompress.report.badge import badge
from vlmcompress.report.junit import junit
from vlmcompress.report.markdown import markdown
from vlmcompress.report.page import page
from vlmcompress.results import FILE, Results


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

"""Write a report: everything is made before anything is written, and no file is ever half there."""

from __future__ import annotations

import json
from pathlib import Path

from vlmcompress.common import folders as atomic
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


def dump(data: object) -> str:
    """JSON as the report's files have it."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def save(folder: str | Path, texts: dict[str, tuple[str, str]]) -> dict[str, Path]:
    """Write kind -> (name, text) and return kind -> path. Nothing of an old report is touched before all is on disk."""
    folder = Path(folder)
    with atomic.user_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        parts = {folder / name: folder / f".{name}.part" for name, _ in texts.values()}
        try:
            for name, text in texts.values():
                part = parts[folder / name]
                part.write_text(text, encoding="utf-8", errors="replace")
                atomic.sync_file(part)
            for path, part in parts.items():
                part.replace(path)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)
    return {kind: folder / name for kind, (name, _) in texts.items()}

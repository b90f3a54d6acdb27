"""A work folder that has begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmcompress.utils.work_folder import WorkFolder


def begun(out: Path, *, restart: bool = False, **settings: Any) -> WorkFolder:
    """The work folder of `out`, for a run with these settings."""
    work = WorkFolder(out, restart)
    work.begin({"command": "test", **settings})
    return work

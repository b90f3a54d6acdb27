"""The file of results: the outcome of each part that was run.

    {"schema": 1, "parts": {"STEP/PART": {"status", "seconds", "when", "device", "commit", ...}}}

`status` is `passed` (with `result`, the part's own data), `failed` (with `error`, its last lines, and `result` where it
found something before) or `skipped` (with `reason`, a line). It is written aside and renamed, after each part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
STATUSES = ("passed", "failed", "skipped")


class Broken(Exception):
    """An unusable file of results; the message is one line."""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The parts in a file; empty without a file. Raises `Broken`."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Broken(f"{path} is not readable JSON ({' '.join(str(error).split())}); restore or remove it") from None
    parts = content.get("parts") if isinstance(content, dict) and content.get("schema") == SCHEMA else None
    if not isinstance(parts, dict) or not all(_fine(part) for part in parts.values()):
        raise Broken(f"{path} holds no results of schema {SCHEMA}; restore or remove it")
    return parts


def _fine(part: Any) -> bool:
    return isinstance(part, dict) and part.get("status") in STATUSES


def write(path: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write all parts: aside, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({"schema": SCHEMA, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def add(path: Path, name: str, part: Mapping[str, Any]) -> bool:
    """Record a part. A skipped one never replaces one that ran. Returns whether it was recorded; raises `Broken`."""
    parts = read(path)
    if part["status"] == "skipped" and parts.get(name, {}).get("status") in ("passed", "failed"):
        return False
    write(path, {**parts, name: dict(part)})
    return True


def done(parts: Mapping[str, Mapping[str, Any]], name: str, device: str) -> bool:
    """Whether a part ran on this device, with any outcome but skipped."""
    part = parts.get(name, {})
    return part.get("status") in ("passed", "failed") and part.get("device") == device

"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was looked at, whether it is fine, and in `detail` what was found or what is wrong."""

    name: str
    ok: bool
    detail: str

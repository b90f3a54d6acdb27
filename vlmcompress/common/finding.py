"""The result of one check, as plans and `doctor` report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was looked at, whether it is fine, and in `detail` what was found or what is wrong."""

    name: str
    ok: bool
    detail: str

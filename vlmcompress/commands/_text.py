"""Words that several verbs print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vlmcompress.common.text import table


class Looked(Protocol):
    """Something that was looked at: a finding of `check`, a check of `doctor`."""

    @property
    def name(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def detail(self) -> str: ...


def looked_text(title: str, findings: Sequence[Looked]) -> str:
    """A title, a line for each thing that was looked at, and how many of them are problems."""
    bad = sum(not finding.ok for finding in findings)
    rows = [("ok" if finding.ok else "PROBLEM", finding.name, finding.detail) for finding in findings]
    verdict = "nothing stands in the way" if not bad else f"{bad} problem{'s' if bad > 1 else ''}"
    return f"{title}\n{table(rows)}\n{len(findings)} things looked at, {verdict}."

"""Words that several verbs print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def phases_text(timing: Mapping[str, float], seconds: float) -> list[str]:
    """Lines about the time that each phase took, of `seconds` in all."""
    rest = {"other": seconds - sum(timing.values())}
    return [
        f"  {'' if number else 'time':<9} {name:<18} {spent:8.1f} s {spent / max(seconds, 1e-9):5.0%}"
        for number, (name, spent) in enumerate([*timing.items(), *rest.items()])
    ]

"""What a verb returns, the exit codes of the command line, and texts that several verbs print."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmcompress.utils.messages import Check
from vlmcompress.utils.text import duration, table

Outcome = tuple[int, Any, str]
"""Exit code, data for `--json`, text for human readers."""

OK, GATE, BAD_INPUT, INTERNAL, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 4, 130


def checks_text(title: str, findings: Sequence[Check]) -> str:
    """A title, a line per finding, and the number of problems, as text."""
    bad = sum(not finding.ok for finding in findings)
    rows = [("ok" if finding.ok else "PROBLEM", finding.name, finding.detail) for finding in findings]
    verdict = "nothing stands in the way" if not bad else f"{bad} problem{'s' if bad > 1 else ''}"
    return f"{title}\n{table(rows)}\n{len(findings)} things looked at, {verdict}."


def written_text(done: Mapping[str, Any], lines: Sequence[str], verbose: bool, notes: Sequence[str] = ()) -> str:
    """The text of a run that wrote something.

    Args:
        done: the run's data for `--json`, with `out`, `seconds`, `timing` and `next`.
        lines: a description of the output.
        verbose: add the seconds of each phase.
        notes: lines before the suggested next commands.
    """
    seconds, timing = done["seconds"], done["timing"] if verbose else {}
    spent = {**timing, "other": seconds - sum(timing.values())} if verbose else {}
    phases = [
        f"  {'' if number else 'time':<9} {name:<18} {part:8.1f} s {part / max(seconds, 1e-9):5.0%}"
        for number, (name, part) in enumerate(spent.items())
    ]
    commands = ["Next:", *(f"  {command}" for command in done["next"])]
    return "\n".join([f"Wrote {done['out']} in {duration(done['seconds'])}.", *lines, *phases, *notes, *commands])


def evaluation_command(candidate: str | Path, baseline: str | Path, flags: str = "") -> str:
    """The command that evaluates a candidate against its baseline, with `--data FILE` except for demo models, which have data.

    Args:
        flags: further flags, quoted; empty, or beginning with a space.
    """
    from vlmcompress.models.data.sources import bundled_data

    data = "" if bundled_data(baseline, "test") or bundled_data(candidate, "test") else " --data FILE"
    return f"vlmcompress eval {shlex.quote(str(candidate))} --baseline {shlex.quote(str(baseline))}{flags}{data}"


def calibration_flag(model: str | Path, used: str | Path | None, bundled_with: str | Path) -> str:
    """The `--calib` flag, with a leading space, for a next `quantize` of a model; empty if it can use bundled data.

    Args:
        used: the data that the user gave to this run, or None; the flag repeats them.
        bundled_with: the model whose bundled data this run used if `used` is None.
    """
    from vlmcompress.models.data.sources import bundled_data

    if used is None and bundled_data(model, "calibration"):
        return ""
    return f" --calib {shlex.quote(str(used or bundled_data(bundled_with, 'calibration') or 'DATA'))}"

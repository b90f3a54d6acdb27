"""What becomes of results: joined with an earlier report's other half, judged by a gate, written, summed up."""

from __future__ import annotations

import tempfile
from pathlib import Path

from vlmcompress.commands._outcome import GATE, OK, UNDECIDED, Outcome
from vlmcompress.common.folders import user_errors
from vlmcompress.evaluation import gate as gates
from vlmcompress.report import findings
from vlmcompress.report.files import write
from vlmcompress.report.text import text
from vlmcompress.results import FILE, Results, Verdict, joined, load

EXIT: dict[Verdict, int] = {"pass": OK, "fail": GATE, "inconclusive": UNDECIDED}


def check_folder(folder: str | Path | None) -> None:
    """Refuse a report folder that can't be written, before hours of measuring.

    Raises:
        UserError: it can't be made, or written to.
    """
    if folder:
        with user_errors(Path(folder)):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass


def conclude(results: Results, gate: gates.GateFile | None, folder: str | Path | None) -> Outcome:
    """Judge, join and write results.

    Args:
        gate: what to judge by; None: nothing is judged and the code is 0.
        folder: where to write a report. If it has one of the same checkpoints, what that knows and `results` doesn't is kept:
            `eval` and `bench` fill one report.
    """
    if folder and (Path(folder) / FILE).is_file():
        results = joined(results, load(folder))
    if gate:
        results = results.model_copy(update={"gate": gates.judge(results, gate)})
    files = write(results, folder) if folder else {}
    code = EXIT[results.gate.verdict] if results.gate else OK
    data = {"ok": code == OK, **results.to_dict(pictures=False), "files": {kind: str(p) for kind, p in files.items()}}
    lines = [text(results), "", *findings.headline(results)]
    if files:
        lines.append(f"Report: {files['html']}")
    return code, data, "\n".join(lines)

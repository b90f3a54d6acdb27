"""The end of `eval` and `bench`: join results with an earlier report's other half, judge them by a gate, write a report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from vlmcompress.cli._outcome import GATE, OK, UNDECIDED, Outcome
from vlmcompress.evaluation.accuracy import gate as gates
from vlmcompress.evaluation.report.files import require_replaceable_report, write_report
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.text import tables
from vlmcompress.evaluation.results import FILE, Results, Side, Verdict, join_results, load_results
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import user_errors

EXIT: dict[Verdict, int] = {"pass": OK, "fail": GATE, "inconclusive": UNDECIDED}


def require_report_folder(
    folder: str | Path | None, sides: Callable[[], tuple[Side, Side]], *, overwrite: bool
) -> None:
    """Raise for a report folder that can't or must not be written, before hours of measuring.

    Args:
        folder: where to write a report; None: no report.
        sides: describes baseline and candidate.
        overwrite: a report of other checkpoints may be replaced.

    Raises:
        UserError: the folder can't be created or written to, or holds other files or a report of other checkpoints.
    """
    if folder:
        require_replaceable_report(Path(folder), *sides(), overwrite=overwrite)
        with user_errors(Path(folder)):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass


def conclude(
    results: Results, gate: gates.GateFile | None, folder: str | Path | None, *, overwrite: bool = True
) -> Outcome:
    """Join results with an earlier report's, judge and write them; return the verb's outcome.

    Args:
        gate: rules to judge by; None: nothing is judged and the exit code is 0.
        folder: where to write a report. The accuracy or speed in an earlier report of the same checkpoints is kept, so that
            `eval` and `bench` fill one report, and its gate judges both.
        overwrite: ignore an earlier report that can't be read.
    """
    if folder and (Path(folder) / FILE).is_file():
        try:
            results = join_results(results, load_results(folder))
        except UserError:
            if not overwrite:
                raise
    # an earlier call's gate also judges this call's measurements; its verdict is only in the report
    rules = gate or (gates.recorded(results.gate) if results.gate else None)
    if rules:
        results = results.model_copy(update={"gate": gates.judge(results, rules)})
    files = write_report(results, folder) if folder else {}
    code = EXIT[results.gate.verdict] if gate and results.gate else OK
    data = {"ok": code == OK, **results.to_dict(pictures=False), "files": {kind: str(p) for kind, p in files.items()}}
    findings = Findings(results)
    lines = [tables(findings), "", *findings.headline]
    if files:
        lines.append(f"Report: {files['html']}")
    return code, data, "\n".join(lines)

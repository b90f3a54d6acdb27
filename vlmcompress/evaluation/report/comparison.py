"""Compare several runs, to choose the candidate with the best trade-off of accuracy, size and speed.

They are compared in `report.html` and `report.md`, with a table and charts of accuracy against size and speed, and in
`comparison.json` for programs; each has its own report in a folder below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from vlmcompress.evaluation.report import files, html, plots, text, words
from vlmcompress.evaluation.report.document import Cell, Lines, Part, Plots, Section, Table, note, verdict_cell
from vlmcompress.evaluation.report.findings import AccuracyRow, Findings
from vlmcompress.evaluation.report.sections import differences
from vlmcompress.evaluation.results import Comparison, Results, Verdict, load_results
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import dump, save_files
from vlmcompress.utils.text import size, times

SCHEMA = 1
COMPARISON = "comparison.json"
_PLOT = (
    "Up and right is better. Filled: the best trade-offs. Bars are intervals; the shaded region is beyond the margin."
)
_NOTES = ["A point is one answer in a hundred."]


@dataclass(frozen=True)
class Row:
    """A run in `comparison.json`.

    Attributes:
        smaller, faster: factors over the baseline, more is better; None: unknown.
        speed_of: the metric of `faster`; `speed_differs`: whether it is more than chance, see `words.unclear`.
        held_to: the gate or margins of the verdict; empty without a verdict.
    """

    name: str
    folder: str
    scheme: str
    baseline: str
    weight_bytes: int
    smaller: float | None
    faster: float | None
    speed_of: str
    speed_differs: bool
    verdict: Verdict | None
    held_to: str
    suites: dict[str, Comparison]


def write_comparison(
    folders: Sequence[str | Path], out: str | Path, *, overwrite: bool = False
) -> tuple[dict[str, Path], str]:
    """Report on the runs in `folders` (each with a `results.json`) in the folder `out`.

    A single run gives the report of `files.write_report`.

    Args:
        overwrite: such a report may replace one of other checkpoints.

    Returns:
        kind ("json", "md", "html" and, for one run, "junit") -> file, and the tables for a terminal.

    Raises:
        UserError: a folder has no readable results, or `out` can't be written, is one of several inputs, holds other files,
            or a report that is not to be overwritten.
    """
    paths = [Path(folder).resolve() for folder in folders]
    out, inputs = Path(out), {path.parent if path.is_file() else path for path in paths}
    runs = [load_results(folder) for folder in folders]
    if len(inputs) > 1 and out.resolve() in inputs:
        raise UserError(f"{out} holds one of the runs; choose another folder for the report")
    if len(runs) == 1:
        files.require_replaceable_report(out, runs[0].baseline, runs[0].candidate, overwrite=overwrite)
        return files.write_report(runs[0], out), text.tables(Findings(runs[0]))
    rows = summarise(runs)
    if overwritten := next((row.folder for row in rows if (out / row.folder).resolve() in inputs), None):
        raise UserError(f"{out / overwritten} holds one of the runs and would be replaced; choose another folder")
    files.require_marked_folder(out, COMPARISON)
    for run, row in zip(runs, rows, strict=True):
        files.write_report(run, out / row.folder)
    title, content = f"{len(rows)} candidates compared", sections(rows)
    plain = [{**asdict(r), "suites": {name: c.model_dump(mode="json") for name, c in r.suites.items()}} for r in rows]
    rendered = {
        "json": (COMPARISON, dump({"schema": SCHEMA, "runs": plain})),
        "md": ("report.md", text.markdown_document(title, headline(rows), _NOTES, content)),
        "html": ("report.html", html.page(title, headline(rows), content, notes=_NOTES)),
    }
    return save_files(out, rendered), text.terminal(content)


def summarise(runs: Sequence[Results]) -> list[Row]:
    """A row per run, in order; duplicate names are numbered."""
    rows: list[Row] = []
    for run in runs:
        name = _unused(run.candidate.name, [row.name for row in rows])
        folder = re.sub(r"[^\w.-]", "-", name).lstrip(".") or "run"
        before, after = run.baseline.weight_bytes, run.candidate.weight_bytes
        findings = Findings(run)
        speed_of, speed = findings.main_speed or ("", None)
        margins = [words.margin(share) for share in sorted({suite.overall.margin for suite in run.suites})]
        limit = f"a margin of {' and '.join(margins)}" * bool(margins)
        rows.append(
            Row(
                name=name,
                folder=_unused(folder, [row.folder for row in rows]),
                scheme=" + ".join(part for part in (run.candidate.scheme, run.candidate.reducer) if part),
                baseline=run.baseline.name,
                weight_bytes=after,
                smaller=before / after if before and after else None,
                faster=speed.gain if speed else None,
                speed_of=speed_of,
                speed_differs=speed is not None and not words.unclear(speed),
                verdict=findings.verdict,
                held_to=run.gate.title if run.gate else limit,
                suites={s.suite.name: s.overall for s in findings.suites},
            )
        )
    return rows


def _unused(name: str, used: Sequence[str]) -> str:
    """The name, numbered if it is taken."""
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(used) + 3))) if n not in used)


def headline(rows: Sequence[Row]) -> list[str]:
    """Sentences on how many candidates kept their accuracy, for each gate or margin, and which of those is best."""
    judged = [row for row in rows if row.verdict]
    kept = [row for row in judged if row.verdict == "pass"]
    lines = [] if judged else [f"{len(rows)} candidates."]
    for limit in dict.fromkeys(row.held_to for row in judged):
        passed, held = ([row for row in group if row.held_to == limit] for group in (kept, judged))
        lines.append(
            f"{len(passed)} of {len(held)} {'candidates pass' if len(held) > 1 else 'candidate passes'} {limit}."
        )
    # Small and fast count among those alone that kept their accuracy; without a verdict nothing else is known.
    for what, most in (("smaller", "Smallest"), ("faster", "Fastest")):
        measured = [row for row in (kept if judged else rows) if getattr(row, what)]
        if measured := [row for row in measured if what == "smaller" or row.speed_differs]:
            best = max(measured, key=lambda row: getattr(row, what))
            lines.append(f"{most}{' of those' * bool(judged)}: {best.name}, {times(getattr(best, what))} {what}.")
    return lines


def sections(rows: Sequence[Row]) -> list[Section]:
    """The candidates, with size, speed and a link to the report of each, and their accuracy in each suite."""
    numbered = {row.name: f"{number} {row.name}" for number, row in enumerate(rows, start=1)}
    lines = []
    for row in rows:
        link = Markup('<a href="{}/report.html">{}</a>').format(quote(row.folder), numbered[row.name])
        lines.append(
            (
                Cell(numbered[row.name], link),
                verdict_cell(row.verdict) if row.verdict else "",
                row.scheme,
                row.baseline,
                size(row.weight_bytes) if row.weight_bytes else "",
                times(row.smaller) if row.smaller else "",
                times(row.faster) + ", can't tell" * (not row.speed_differs) if row.faster else "",
            )
        )
    head = ["candidate", "verdict", "scheme", "baseline", "weights", "smaller", "faster"]
    parts: list[Part] = [Table(head, lines, look="cards")]
    if measured := list(dict.fromkeys(row.speed_of for row in rows if row.speed_of)):
        parts.append(note(f"Faster: {'; '.join(measured)}."))
    content = [Section("Candidates", parts, "runs")]
    for suite in dict.fromkeys(name for row in rows for name in row.suites):
        overall = [AccuracyRow(numbered[row.name], row.suites[suite], True) for row in rows if suite in row.suites]
        plotted = [plot for gain in ("smaller", "faster") for plot in _plot(rows, suite, gain)]
        drawn: list[Part] = [Plots(plotted), Lines([_PLOT], "legend")] if plotted else []
        content.append(Section(f"Accuracy on {suite}", [*drawn, *differences("candidate", overall)]))
    return content


def _plot(rows: Sequence[Row], suite: str, gain: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The plot of accuracy against a gain, `smaller` or `faster`, if at least two candidates have it."""
    dots = []
    for number, row in enumerate(rows, start=1):
        if (c := row.suites.get(suite)) and (value := getattr(row, gain)):
            ends = {"difference": c.difference, "low": c.low, "high": c.high, "tone": c.verdict}
            dots.append({"number": number, "name": row.name, "gain": value, **ends})
    if len(dots) < 2:
        return []
    label = f"Accuracy against times {gain}: " + "; ".join(f"{dot['name']} {times(dot['gain'])}" for dot in dots)
    margin = max(row.suites[suite].margin for row in rows if suite in row.suites)
    title = f"Accuracy against {'size' if gain == 'smaller' else 'speed'}, points from the baseline"
    return [(title, plots.scatter(dots, f"times {gain}", margin, label))]

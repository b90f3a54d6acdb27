"""Compare several runs, to choose the candidate with the best trade-off of accuracy, size and speed.

`merge` combines an evaluation and a benchmark of the same candidate and baseline to one run. The merged runs are compared in
`report.html` and `report.md`, with a table and charts of accuracy against size and speed, and in `comparison.json` for
programs; each has its own report in a folder below.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from vlmcompress.evaluation.report import files, html, plots, words
from vlmcompress.evaluation.report.findings import Findings, SuiteFindings
from vlmcompress.evaluation.report.text import MARKS, escape, markdown_table
from vlmcompress.evaluation.results import Comparison, Results, Verdict, load_results
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import dump, save_files
from vlmcompress.utils.text import points, size, times
from vlmcompress.utils.text import table as aligned

SCHEMA = 1
COMPARISON = "comparison.json"
_PLOT = (
    "Up and right is better. Filled: the best trade-offs. Bars are intervals; the shaded region is beyond the margin."
)


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


def merge(runs: Sequence[Results]) -> list[Results]:
    """Merge runs of the same candidate and baseline that don't conflict.

    Runs conflict, and stay separate, if both have a benchmark, a gate or a suite of the same name. Facts that occur once in a
    report (date, machine, settings of the engine) come from the first of two merged runs.
    """
    merged: list[Results] = []
    for b in runs:
        for index, a in enumerate(merged):
            shared = {suite.name for suite in a.suites} & {suite.name for suite in b.suites}
            # A second measurement of the same thing is no addition: which one counts is the reader's choice.
            if a.identity() == b.identity() and not (shared or (a.bench and b.bench) or (a.gate and b.gate)):
                joined = {"suites": a.suites + b.suites, "samples": a.samples + b.samples}
                joined |= {
                    "bench": a.bench or b.bench,
                    "gate": a.gate or b.gate,
                    "pictures": {**b.pictures, **a.pictures},
                }
                joined["candidate"] = a.candidate if a.candidate.layer_errors else b.candidate
                merged[index] = a.model_copy(update=joined)
                break
        else:
            merged.append(b)
    return merged


def write_comparison(folders: Sequence[str | Path], out: str | Path, *, overwrite: bool = False) -> dict[str, Path]:
    """Report on the runs in `folders` (each with a `results.json`) in the folder `out`.

    A single run, also after `merge`, gives the report of `files.write_report`.

    Args:
        overwrite: such a report may replace one of other checkpoints.

    Returns:
        kind ("json", "md", "html" and, for one run, "junit" and "badge") -> file.

    Raises:
        UserError: a folder has no readable results, or `out` can't be written, is one of several inputs, holds other files,
            or a report that is not to be overwritten.
    """
    paths = [Path(folder).resolve() for folder in folders]
    out, inputs = Path(out), {path.parent if path.is_file() else path for path in paths}
    runs = merge([load_results(folder) for folder in folders])
    if len(inputs) > 1 and out.resolve() in inputs:
        raise UserError(f"{out} holds one of the runs; choose another folder for the report")
    if len(runs) == 1:
        files.require_replaceable_report(out, runs[0].baseline, runs[0].candidate, overwrite=overwrite)
        return files.write_report(runs[0], out)
    rows = summarise(runs)
    if overwritten := next((row.folder for row in rows if (out / row.folder).resolve() in inputs), None):
        raise UserError(f"{out / overwritten} holds one of the runs and would be replaced; choose another folder")
    files.require_marked_folder(out, COMPARISON)
    for run, row in zip(runs, rows, strict=True):
        files.write_report(run, out / row.folder)
    plain = [{**asdict(r), "suites": {name: c.model_dump(mode="json") for name, c in r.suites.items()}} for r in rows]
    return save_files(
        out,
        {
            "json": (COMPARISON, dump({"schema": SCHEMA, "runs": plain})),
            "md": ("report.md", markdown(rows)),
            "html": ("report.html", page(runs, rows)),
        },
    )


def comparison_tables(folders: Sequence[str | Path]) -> str:
    """The recovered scores of the runs' candidates, as tables for a terminal; empty without an evaluation."""
    tables = recovery_tables(summarise(merge([load_results(folder) for folder in folders])))
    return "\n\n".join(aligned([["recovery", r.baseline, *r.names], *r.lines]) for r in tables)


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
        limit = (
            f"a margin of {margins[0]}" if len(margins) == 1 else f"margins of {' and '.join(margins)}" * bool(margins)
        )
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
    eligible = kept if judged else rows
    if len(eligible) == 1:
        (only,) = eligible
        gains = [(only.smaller, "smaller"), (only.faster if only.speed_differs else None, "faster")]
        text = ", ".join(f"{times(gain)} {what}" for gain, what in gains if gain)
        return [*lines, f"{only.name}: {text}."] if text else lines
    for what, most in (("smaller", "Smallest"), ("faster", "Fastest")):
        measured = [row for row in eligible if getattr(row, what) and (what == "smaller" or row.speed_differs)]
        if measured:
            best = max(measured, key=lambda row: getattr(row, what))
            lines.append(f"{most}{' of those' if judged else ''}: {best.name}, {times(getattr(best, what))} {what}.")
    return lines


def markdown(rows: Sequence[Row]) -> str:
    """The comparison's `report.md`."""
    suites = list(dict.fromkeys(name for row in rows for name in row.suites))
    head = [
        "candidate",
        "verdict",
        "scheme",
        "weights",
        "smaller",
        "faster",
        *(f"{s}, points (interval)" for s in suites),
    ]
    lines = []
    for row in rows:
        gains = [times(row.smaller) if row.smaller else ""]
        gains += [times(row.faster) + ", can't tell" * (not row.speed_differs) if row.faster else ""]
        weights = size(row.weight_bytes) if row.weight_bytes else ""
        changes = [words.difference_text(c) if (c := row.suites.get(suite)) else "" for suite in suites]
        lines.append([row.name, MARKS[row.verdict] if row.verdict else "", row.scheme, weights, *gains, *changes])
    parts = [
        f"# {len(rows)} candidates compared",
        "  \n".join(map(escape, headline(rows))),
        markdown_table(head, lines),
    ]
    for baseline, names, recovered in recovery_tables(rows):
        parts += ["## Recovery", markdown_table(["benchmark", baseline, *names], recovered)]
    if measured := list(dict.fromkeys(row.speed_of for row in rows if row.speed_of)):
        parts.append(escape(f"Faster: {'; '.join(measured)}."))
    return "\n\n".join(parts) + "\n"


class Recovery(NamedTuple):
    """A table for the candidates of one baseline: rows are benchmarks, size and speed, columns the baseline and candidates."""

    baseline: str
    names: list[str]
    lines: list[list[str]]


def recovery_tables(rows: Sequence[Row]) -> list[Recovery]:
    """The share of its baseline's scores that each candidate recovers, with points and intervals; a table per baseline."""
    tables = []
    for baseline in dict.fromkeys(row.baseline for row in rows if row.suites):
        columns = [row for row in rows if row.baseline == baseline and row.suites]
        lines = []
        for suite in dict.fromkeys(name for row in columns for name in row.suites):
            measured = [row.suites.get(suite) for row in columns]
            scores = dict.fromkeys(words.percent(c.baseline) for c in measured if c)
            cells = []  # such as `96.0%; 99.2% (-0.8, -1.5 to +0.1 points)`
            for c in measured:
                recovered = f"; {words.recovery(c)}" if c and c.baseline else ""
                limits = f"{points(c.difference)}, {points(c.low)} to {points(c.high)} points" if c else ""
                cells.append(f"{words.percent(c.candidate)}{recovered} ({limits})" if c else "")
            lines.append([suite, " or ".join(scores), *cells])
        lines.append(["weights, times smaller", "", *(times(row.smaller) if row.smaller else "" for row in columns)])
        lines.append(["times faster", "", *(times(row.faster) if row.faster else "" for row in columns)])
        tables.append(Recovery(baseline, [row.name for row in columns], [line for line in lines if any(line[1:])]))
    return tables


def page(runs: Sequence[Results], rows: Sequence[Row]) -> str:
    """The comparison's `report.html`; plots of accuracy where at least two candidates have a gain."""
    numbered = {row.name: f"{number} {row.name}" for number, row in enumerate(rows, start=1)}
    lines = []
    for row in rows:
        link = Markup('<a href="{}/report.html">{}</a>').format(quote(row.folder), numbered[row.name])
        faster = times(row.faster) + ", can't tell" * (not row.speed_differs) if row.faster else ""
        verdict = html.pill(row.verdict) if row.verdict else ""
        weights, smaller = (
            (size(row.weight_bytes) if row.weight_bytes else ""),
            (times(row.smaller) if row.smaller else ""),
        )
        lines.append((link, verdict, row.scheme, row.baseline, weights, smaller, faster))
    head = ["candidate", "verdict", "scheme", "baseline", "weights", "smaller", "faster"]
    parts = [html.table(head, lines, look="cards")]
    if measured := list(dict.fromkeys(row.speed_of for row in rows if row.speed_of)):
        parts.append(html.note(f"Faster: {'; '.join(measured)}."))
    sections = [html.section("runs", "Candidates", *parts)]
    suites = [(row, s) for run, row in zip(runs, rows, strict=True) for s in Findings(run).suites]
    for name in dict.fromkeys(s.suite.name for _, s in suites):
        measured_on = [(row, s) for row, s in suites if s.suite.name == name]
        plotted = [plot for what in ("smaller", "faster") for plot in _plot(measured_on, what, list(numbered))]
        overall = [s.rows[0]._replace(name=numbered[row.name]) for row, s in measured_on]
        drawn = [{"kind": "plots", "plots": plotted}, html.note(_PLOT)] if plotted else []
        parts = [*drawn, *html.differences("candidate", overall)]
        families = dict.fromkeys(line.name for _, s in measured_on for line in s.rows[1:])
        if families:
            cells = [{line.name: line.comparison for line in s.rows[1:]} for _, s in measured_on]
            by_family = [
                (
                    family,
                    *(
                        html.strong(points(c.difference), c.verdict == "fail") if (c := of.get(family)) else ""
                        for of in cells
                    ),
                )
                for family in families
            ]
            columns = ["family", *(numbered[row.name] for row, _ in measured_on)]
            parts += [html.heading("By family, points from the baseline"), html.table(columns, by_family, look="short")]
            parts.append(
                html.note("Red and bold: more than the margin is lost, after correction for the number of families.")
            )
        sections.append(html.section("", f"Accuracy on {name}", *parts))
    return html.fill_page(
        title=f"{len(rows)} candidates compared",
        eyebrow="What compression cost and what it won",
        heading=f"{len(rows)} candidates compared",
        verdict=None,
        headline=headline(rows),
        notes=["A point is one answer in a hundred. A family is a group of questions of one kind."] if suites else [],
        sections=sections,
    )


def _plot(
    measured: Sequence[tuple[Row, SuiteFindings]], gain: str, names: Sequence[str]
) -> list[tuple[str, html.Part]]:
    """The plot of accuracy against a gain, `smaller` or `faster`, if at least two candidates have it."""
    dots = []
    for row, s in measured:
        if value := getattr(row, gain):
            c = s.overall
            ends = {"difference": c.difference, "low": c.low, "high": c.high, "tone": c.verdict}
            dots.append({"number": 1 + names.index(row.name), "name": row.name, "gain": value, **ends})
    if len(dots) < 2:
        return []
    label = f"Accuracy against times {gain}: " + "; ".join(f"{dot['name']} {times(dot['gain'])}" for dot in dots)
    plot = plots.scatter(dots, f"times {gain}", max(s.overall.margin for _, s in measured), label)
    title = f"Accuracy against {'size' if gain == 'smaller' else 'speed'}, points from the baseline"
    return [(title, plot)]

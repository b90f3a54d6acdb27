"""Findings as text: tables for a terminal, and Markdown for `report.md` and model cards, verdict first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.results import Ratio, Verdict
from vlmcompress.export.manifest import error_kind
from vlmcompress.utils.text import figures, percentage, points, size
from vlmcompress.utils.text import table as columns

LIMIT = 60_000  # bytes of `report.md`, which CI shows as a summary; sections beyond it are left out
MARKS: dict[Verdict, str] = {
    "pass": "\N{WHITE HEAVY CHECK MARK} pass",
    "fail": "\N{CROSS MARK} fail",
    "inconclusive": "\N{WHITE QUESTION MARK ORNAMENT} can't tell",
}
SPEED = ("", "baseline", "candidate", "candidate is", "in the repeats")
_FAMILIES, _EXAMPLES, _LAYERS = 60, 8, 5  # rows of a table


def tables(findings: Findings) -> str:
    """Accuracy of each suite, the gate's rules, and speed, for a terminal."""
    results = findings.results
    parts = [f"{results.candidate.name} against {results.baseline.name}"]
    for s in findings.suites:
        interval = f"difference ({s.overall.level:.0%} interval), points"
        rows: list[tuple[object, ...]] = [("family", "samples", "baseline", "candidate", interval, "")]
        for name, c, judged in s.rows:
            verdict = f"{words.VERDICTS[c.verdict]}, margin {100 * c.margin:.4g}" if judged else ""
            rows.append((name, c.n, f"{c.baseline:.1%}", f"{c.candidate:.1%}", words.difference_text(c), verdict))
        suspect = [f"{what}: {b} of the baseline's, {c} of the candidate's" for what, (b, c) in s.suspect if b or c]
        lines = [f"{s.suite.name}: {s.suite.metric}", columns(rows), *(f"  {line}" for line in s.notes + suspect)]
        parts.append("\n".join(lines))
    if gate := results.gate:
        rules = [(r.name, words.VERDICTS[r.verdict], r.value, r.limit, r.reason) for r in findings.rules]
        table = columns([("rule", "verdict", "found", "limit", ""), *rules])
        parts.append(f"{gate.title}: {words.VERDICTS[gate.verdict]}\n{table}")
    if bench := results.bench:
        turns = f"{bench.repeats} turn{'s' * (bench.repeats > 1)} a side"
        work = f"{bench.requests} requests a burst, {bench.out_tokens} tokens an answer, {turns}"
        parts.append(f"load {bench.load}, {work}; {Path(bench.source).name}")
        for t in findings.speed:
            caches = "no caches" if t.state == "cold" else "caches on"
            parts.append(f"{words.MODES[t.mode]}, {caches}\n{columns([SPEED, *_speed_rows(t.metrics)])}")
        if findings.memory:
            parts.append(f"memory\n{columns([('', 'baseline', 'candidate'), *findings.memory])}")
        if findings.drafting:
            parts.append(f"speculative decoding\n{columns(findings.drafting)}")
        if failed := sum(run.failed for run in bench.runs):
            parts.append(f"{failed} of {failed + sum(run.completed for run in bench.runs)} requests failed.")
    return "\n\n".join(parts)


def _speed_rows(metrics: Mapping[str, Ratio]) -> list[tuple[str, ...]]:
    return [
        (words.metric_name(name), figures(r.baseline), figures(r.candidate), words.pace(r), words.spread(r))
        for name, r in metrics.items()
    ]


def markdown(findings: Findings) -> str:
    """The content of `report.md`."""
    results = findings.results
    sections = [f"# {escape(results.candidate.name)} against {escape(results.baseline.name)}"]
    sections.append("  \n".join(map(escape, findings.headline)))
    sections.append(escape(words.glossary(results)))
    if gate := results.gate:
        rules = [(r.name, MARKS[r.verdict], r.value, r.limit, r.reason) for r in findings.rules]
        sections += [
            f"## {escape(gate.title[:1].upper() + gate.title[1:])}",
            markdown_table(["rule", "", "found", "limit", ""], rules, right=()),
        ]
    sections += _figures(findings)
    if findings.memory:
        sections += ["## Memory", markdown_table(["", "baseline", "candidate"], findings.memory)]
    lost = []
    for s in (s for s in findings.changed if s.change == 0):
        texts = (s.question, s.expected, s.baseline, s.candidate)
        lost.append((s.family, *(t if len(t) <= 120 else t[:119] + "\N{HORIZONTAL ELLIPSIS}" for t in texts)))
    if lost:
        head = ["family", "question", "expected", "baseline", "candidate"]
        sections += ["## Lost answers", markdown_table(head, lost[:_EXAMPLES], right=())]
    if layer_errors := results.candidate.layer_errors:
        errors = [(error, layer, kind) for layer, by_kind in layer_errors.items() for kind, error in by_kind.items()]
        worst = sorted(errors, reverse=True)[:_LAYERS]
        largest = [(layer, error_kind(kind), percentage(error)) for error, layer, kind in worst]
        sections += [
            "## Layers with the largest error",
            markdown_table(["layer", "tokens", "error"], largest, right=(2,)),
        ]
        sections.append(words.layer_errors_text(layer_errors))
    if findings.made:
        heading = f"## How {escape(results.candidate.name)} was made"
        sections += [heading, markdown_table(["", ""], findings.made, right=())]
    sections += ["## Method", "\n".join(f"- {escape(line)}" for line in [*findings.method, findings.about])]
    kept, size = [], 0
    for section in sections:
        size += len(section.encode()) + 2
        if size > LIMIT:
            kept.append("*The rest did not fit; report.html and results.json have all of it.*")
            break
        kept.append(section)
    return "\n\n".join(kept) + "\n"


def _figures(findings: Findings) -> list[str]:
    """Sections on recovered scores, the accuracy of each suite, and speed."""
    results, rows = findings.results, list[tuple[str, ...]]()
    for s in findings.suites:  # as in published model cards: both scores, what is recovered, and how sure that is
        c, name = s.overall, f"{s.suite.name} ({s.suite.metric})"
        rows.append(
            (name, words.percent(c.baseline), words.percent(c.candidate), words.recovery(c), words.difference_text(c))
        )
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if rows and before and after:
        rows.append(("weights", size(before), size(after), words.percent(after / before), ""))
    if rows and findings.main_speed:
        name, r = findings.main_speed
        rows.append((name, figures(r.baseline), figures(r.candidate), words.pace(r), words.spread(r)))
    head = ["benchmark", results.baseline.name, results.candidate.name, "recovery", "points (interval)"]
    sections = ["## Recovery", markdown_table(head, rows)] if rows else []
    for s in findings.suites:
        notes = s.notes + [f"{what}: {before:,} before, {after:,} after." for what, (before, after) in s.suspect]
        overall, hidden = s.suite.overall, len(s.suite.families) - _FAMILIES
        if overall.baseline_only is not None:
            only = f"Right only before: {overall.baseline_only:,}. Right only after: {overall.candidate_only:,}."
            notes.insert(0, only)
        if hidden > 0:
            notes.append(f"{hidden:,} more families are in results.json.")
        head, rows = ["family", "n", "baseline", "candidate", "points", "interval", "verdict (margin)"], []
        for name, c, judged in s.rows[: _FAMILIES + 1]:
            scores = words.percent(c.baseline), words.percent(c.candidate), points(c.difference)
            verdict = f"{MARKS[c.verdict]} ({100 * c.margin:.1f})" if judged else ""
            rows.append((name, f"{c.n:,}", *scores, f"{points(c.low)} to {points(c.high)}", verdict))
        sections.append(f"## Accuracy: {escape(s.suite.name)} ({escape(s.suite.metric)})")
        sections.append(markdown_table(head, rows))
        sections.append("\n".join(f"- {escape(note)}" for note in notes))
    if bench := findings.results.bench:
        for mode, state, metrics in findings.speed:
            clients = f", {escape(words.load_text(bench))}" if mode == "serve" else ""
            sections += [
                f"## Speed: {words.MODES[mode]}, {state}{clients}",
                markdown_table(SPEED, _speed_rows(metrics)),
            ]
        sections += [
            "## What was processed",
            markdown_table(["counted by the server", "baseline", "candidate"], findings.work),
        ]
        if findings.drafting:
            sections += ["## Speculative decoding", markdown_table(findings.drafting[0], findings.drafting[1:])]
    return sections


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] | None = None) -> str:
    """A Markdown table; `right` lists the columns set right, None: all but the first."""
    line = ["---:" if (i in right if right is not None else i) else "---" for i in range(len(head))]
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in ([*map(escape, head)], line, *cells))


def escape(text: str) -> str:
    """The text as one line of Markdown with all markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(words.printable(text).split()))

"""Render `report.md`: the short report, verdict first, for a CI summary and for reading in a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from vlmcompress.common.text import figures, percentage, points
from vlmcompress.report import findings, making, words
from vlmcompress.report.examples import changed, kind
from vlmcompress.results import Bench, Gate, Results, Side, Suite, Verdict

LIMIT = 60_000  # bytes; sections that would pass it are left out
MARKS: dict[Verdict, str] = {
    "pass": "\N{WHITE HEAVY CHECK MARK} pass",
    "fail": "\N{CROSS MARK} fail",
    "inconclusive": "\N{WHITE QUESTION MARK ORNAMENT} can't tell",
}
_FAMILIES, _EXAMPLES, _LAYERS = 60, 8, 5  # rows of a table


def markdown(results: Results) -> str:
    """Render the whole text of `report.md`."""
    title = f"# {escape(results.candidate.name)} against {escape(results.baseline.name)}"
    sections = [title, "\n".join(f"{line}  " for line in map(escape, findings.headline(results))).rstrip()]
    sections.append(escape(findings.glossary(results)))
    if gate := results.gate:
        rows = [(r.name, MARKS[r.verdict], r.value, r.limit, r.reason) for r in findings.rules(gate)]
        sections += [f"## Gate {escape(gate.name)}", table(["rule", "", "found", "limit", ""], rows, right=())]
    for suite in results.suites:
        sections += _suite(suite, results.gate)
    if results.bench:
        sections += _speed(results.bench)
    sections += _memory(results)
    sections += _examples(results)
    sections += _layers(results.candidate)
    sections += _making(results.candidate)
    sections += ["## Method", "\n".join(f"- {escape(line)}" for line in [*findings.method(results), about(results)])]
    return _within(sections)


def measured(results: Results) -> str:
    """Render what a model card says of results: the verdict, accuracy and speed, under headings of the third level."""
    sections = [
        f"Compared with {escape(results.baseline.name)}.",
        "\n".join(f"- {escape(one)}" for one in findings.headline(results)),
    ]
    for suite in results.suites:
        sections += _suite(suite, results.gate)
    if results.bench:
        sections += _speed(results.bench)
    sections += [escape(findings.glossary(results)), escape(about(results))]
    return "\n\n".join(re.sub(r"^## ", "### ", section) for section in sections)


def about(results: Results) -> str:
    """Write machine, engine, version and date in a line."""
    machine = [f"{key} {value}" for key, value in results.machine.items() if isinstance(value, str | int | float)]
    engine = [str(results.candidate.engine[k]) for k in ("name", "version", "device") if k in results.candidate.engine]
    said = [" ".join(engine), ", ".join(machine), f"vlmcompress {results.version}", results.created]
    return "; ".join(part for part in said if part) + "."


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] | None = None) -> str:
    """Render a table; `right` lists the columns set right, None: all but the first."""
    line = ["---:" if (i in right if right is not None else i) else "---" for i in range(len(head))]
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in ([*map(escape, head)], line, *cells))


def escape(text: str) -> str:
    """Escape a text as one line in which nothing is markup."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(words.printable(text).split()))


def _suite(suite: Suite, gate: Gate | None) -> list[str]:
    rows = [_row(row) for row in findings.rows(suite, gate)[: _FAMILIES + 1]]
    head = ["family", "n", "baseline", "candidate", "points", "interval", "verdict (margin)"]
    o = suite.overall
    notes = (
        findings.tokens(suite)
        + findings.changes(suite)
        + [f"{what}: {b:,} before, {c:,} after." for what, (b, c) in findings.trouble(suite)]
    )
    if o.baseline_only is not None:
        notes.insert(0, f"Right only before: {o.baseline_only:,}. Right only after: {o.candidate_only:,}.")
    if (hidden := len(suite.families) - _FAMILIES) > 0:
        notes.append(f"{hidden:,} more families are in results.json.")
    heading = f"## Accuracy: {escape(suite.name)} ({escape(suite.metric)})"
    return [heading, table(head, rows), "\n".join(f"- {escape(note)}" for note in notes)]


def _row(row: findings.Row) -> tuple[str, ...]:
    name, c, judged = row
    shown = (words.percent(c.baseline), words.percent(c.candidate), points(c.difference))
    verdict = f"{MARKS[c.verdict]} ({100 * c.margin:.1f})" if judged else ""
    return (name, f"{c.n:,}", *shown, f"{points(c.low)} to {points(c.high)}", verdict)


def _speed(bench: Bench) -> list[str]:
    found = []
    for mode, states in bench.summary.items():
        for state, metrics in states.items():
            clients = f", {escape(words.load(bench))}" if mode == "serve" else ""
            rows = [
                (
                    words.metric(name),
                    figures(r.baseline),
                    figures(r.candidate),
                    words.pace(r),
                    words.spread(r),
                )
                for name, r in metrics.items()
            ]
            head = ["", "baseline", "candidate", "candidate is", "in the repeats"]
            found += [f"## Speed: {words.MODES[mode]}, {state}{clients}", table(head, rows)]
    processed = table(["counted by the server", "baseline", "candidate"], findings.work(bench))
    return [*found, "## What was processed", processed]


def _memory(results: Results) -> list[str]:
    rows = findings.memory(results)
    return ["## Memory", table(["", "baseline", "candidate"], rows)] if rows else []


def _examples(results: Results) -> list[str]:
    samples = [sample for sample in changed(results.samples) if kind(sample) == 0][:_EXAMPLES]
    rows = [(s.family, *(_short(t) for t in (s.question, s.expected, s.baseline, s.candidate))) for s in samples]
    head = ["family", "question", "expected", "baseline", "candidate"]
    return ["## Lost answers", table(head, rows, right=())] if rows else []


def _layers(side: Side) -> list[str]:
    worst = sorted(((e, n, m) for n, found in side.layer_errors.items() for m, e in found.items()), reverse=True)
    if not worst:
        return []
    rows = [(name, words.error_kind(kind), percentage(error)) for error, name, kind in worst[:_LAYERS]]
    head = ["layer", "tokens", "error"]
    return ["## Layers with the largest error", table(head, rows, right=(2,)), findings.layers(side.layer_errors)]


def _making(side: Side) -> list[str]:
    rows = making.rows(side)
    return [f"## How {escape(side.name)} was made", table(["", ""], rows, right=())] if rows else []


def _short(text: str, most: int = 120) -> str:
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _within(sections: Sequence[str]) -> str:
    """Join sections up to the size limit of a CI summary, with a note on those left out."""
    kept, used = [], 0
    for section in sections:
        used += len(section.encode()) + 2
        if used > LIMIT:
            kept.append("*The rest did not fit; report.html and results.json have all of it.*")
            break
        kept.append(section)
    return "\n\n".join(kept) + "\n"

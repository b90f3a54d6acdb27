"""Render results for a terminal, as tables of figures; the sentences come from `findings`."""

from __future__ import annotations

from vlmcompress.common.text import points, table
from vlmcompress.report import findings
from vlmcompress.report.words import VERDICTS
from vlmcompress.results import Gate, Results, Suite


def text(results: Results) -> str:
    """Render accuracy, speed and the gate's rules, as far as they were measured."""
    parts = [f"{results.candidate.name} against {results.baseline.name}"]
    parts += [accuracy(suite, results.gate) for suite in results.suites]
    if results.gate:
        parts.append(rules(results.gate))
    return "\n\n".join(parts)


def accuracy(suite: Suite, gate: Gate | None = None) -> str:
    """Render one suite, as a whole and by family, and its counts of suspect answers."""
    head = (
        "family",
        "samples",
        "baseline",
        "candidate",
        f"difference ({suite.overall.level:.0%} interval), points",
        "",
    )
    rows = [_row(row) for row in findings.rows(suite, gate)]
    lines = [
        f"{suite.name}: {suite.metric}",
        table([head, *rows]),
        *(f"  {line}" for line in findings.tokens(suite) + findings.changes(suite)),
    ]
    for what, (before, after) in findings.trouble(suite):
        if before or after:
            lines.append(f"  {what}: {before} of the baseline's, {after} of the candidate's")
    return "\n".join(lines)


def rules(gate: Gate) -> str:
    """Render a gate's rules, a line each."""
    rows = [
        ("rule", "verdict", "found", "limit", ""),
        *((r.name, VERDICTS[r.verdict], r.value, r.limit, r.reason) for r in findings.rules(gate)),
    ]
    return f"gate {gate.name}: {VERDICTS[gate.verdict]}\n{table(rows)}"


def _row(row: findings.Row) -> tuple[object, ...]:
    name, c, judged = row
    interval = f"{points(c.difference)} ({points(c.low)} to {points(c.high)})"
    verdict = f"{VERDICTS[c.verdict]}, margin {100 * c.margin:.4g}" if judged else ""
    return name, c.n, f"{c.baseline:.1%}", f"{c.candidate:.1%}", interval, verdict

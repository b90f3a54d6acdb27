"""Results for a terminal: tables of figures; the sentences are in `findings`."""

from __future__ import annotations

from vlmcompress.common.text import table
from vlmcompress.report import findings
from vlmcompress.report.words import VERDICTS
from vlmcompress.results import Comparison, Gate, Results, Suite


def text(results: Results) -> str:
    """Accuracy, speed and the gate's rules, as far as they were measured."""
    parts = [f"{results.candidate.name} against {results.baseline.name}"]
    parts += [accuracy(suite) for suite in results.suites]
    if results.gate:
        parts.append(rules(results.gate))
    return "\n\n".join(parts)


def accuracy(suite: Suite) -> str:
    """One suite by family, and the answers that are suspect in themselves."""
    head = (
        "family",
        "samples",
        "baseline",
        "candidate",
        f"difference ({suite.overall.level:.0%} interval), points",
        "",
    )
    rows = [_row("all", suite.overall), *(_row(name, found) for name, found in suite.families.items())]
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
    """A gate's rules, one a line."""
    rows = [
        ("rule", "verdict", "found", "limit", ""),
        *((r.name, VERDICTS[r.verdict], r.value, r.limit, r.reason) for r in gate.rules),
    ]
    return f"gate {gate.name}: {VERDICTS[gate.verdict]}\n{table(rows)}"


def _row(name: str, c: Comparison) -> tuple[object, ...]:
    interval = f"{100 * c.difference:+.1f} ({100 * c.low:+.1f} to {100 * c.high:+.1f})"
    return name, c.n, f"{c.baseline:.1%}", f"{c.candidate:.1%}", interval, VERDICTS[c.verdict]

"""Render `badge.json`, in the endpoint schema of shields.io: one line on what compression cost and won."""

from __future__ import annotations

from vlmcompress.common.text import points, smaller
from vlmcompress.report import findings, words
from vlmcompress.results import Results

_COLOURS = {"pass": "brightgreen", "fail": "red", "inconclusive": "yellow", None: "blue"}


def badge(results: Results) -> dict[str, object]:
    """Make the badge `accuracy -0.2 points, 1.96x smaller`, coloured by the gate's verdict or, without one, the suites'."""
    parts = []
    if results.suites:
        worst = min((suite.overall for suite in results.suites), key=lambda c: c.difference)
        parts.append(f"{points(worst.difference)} points")
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if before and after:
        parts.append(smaller(before, after))
    if results.bench and (found := findings.main_speed(results.bench)):
        parts.append(words.pace(found[1]))
    verdict = findings.overall(results)
    if verdict in ("fail", "inconclusive"):
        parts.append(words.VERDICTS[verdict])
    label = "accuracy" if results.suites else "compression"
    message = words.typeset(", ".join(parts) or "nothing measured")
    return {"schemaVersion": 1, "label": label, "message": message, "color": _COLOURS[verdict]}

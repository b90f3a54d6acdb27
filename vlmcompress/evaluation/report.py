"""Write an evaluation down: `results.json` for programs, `report.md` for CI summaries, `report.html` for people."""

from __future__ import annotations

import json
from pathlib import Path

from vlmcompress.errors import UserError
from vlmcompress.evaluation.accuracy import Results
from vlmcompress.evaluation.html import page
from vlmcompress.evaluation.paired import Paired


def write_report(results: Results, folder: str | Path) -> dict[str, Path]:
    """Write the three files into `folder` (made if missing, older files replaced).

    Returns:
        `{"json": path, "md": path, "html": path}`.
    """
    folder = Path(folder)
    texts = {
        "json": ("results.json", json.dumps(results.to_dict(), indent=1, ensure_ascii=False) + "\n"),
        "md": ("report.md", markdown(results)),
        "html": ("report.html", page(results, verdict(results.overall), method(results))),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.values():
            part = folder / f".{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)
    except OSError as error:
        raise UserError(f"{folder}: can't write the report ({error.strerror or error})") from error
    return {kind: folder / name for kind, (name, _) in texts.items()}


def verdict(r: Paired) -> str:
    """One sentence on what the interval says."""
    interval = f"{points(r.difference)} points, {r.level:.0%} interval {points(r.low)} to {points(r.high)}"
    if r.high < 0:
        return f"The candidate is less accurate ({interval})."
    if r.low > 0:
        return f"The candidate is more accurate ({interval})."
    return f"No difference in accuracy could be shown with {r.n} questions ({interval})."


def method(results: Results) -> str:
    """How the numbers were made, for the foot of a report."""
    r = results.overall
    clustered = f", widened for questions that share an image (design effect {r.design_effect:.2f})"
    return (
        f"Both checkpoints answered the same {r.n} questions greedily in {engine(results)}; an answer counts when it "
        "equals the expected one but for case, spaces and a final full stop. Intervals are Tango's score intervals of "
        f"the paired difference{clustered if r.design_effect > 1 else ''}; p is exact (McNemar's test, "
        f"by image): {r.p:.3g}. Intervals of single families are not corrected for how many there are."
    )


def engine(results: Results) -> str:
    """`vLLM 0.32.0 on cpu`."""
    about = results.candidate.engine
    return f"vLLM {about.get('version', '?')} on {about.get('device_name') or about.get('device', '?')}"


def markdown(results: Results) -> str:
    """A short report, fit for a CI summary."""
    r, before, after = results.overall, results.baseline, results.candidate
    lines = [
        f"# {Path(after.path).name} against {Path(before.path).name}",
        "",
        verdict(r),
        "",
        "| | baseline | candidate | difference (points) | interval | n |",
        "|---|---:|---:|---:|---:|---:|",
        _row("**all**", r),
        *(_row(name.replace("|", "\\|"), family) for name, family in results.families.items()),
        "",
        f"- Weights: {megabytes(before.weight_bytes)} before, {megabytes(after.weight_bytes)} after"
        f" ({after.weight_bytes / max(before.weight_bytes, 1):.0%}).",
        f"- Same answer from both: {results.agreement:.1%}. Right only before: {r.baseline_only}; only after: "
        f"{r.candidate_only}.",
        f"- Empty answers: {before.empty} before, {after.empty} after; cut off at {results.data.get('max_tokens', '?')} "
        f"tokens: {before.cut_off} before, {after.cut_off} after.",
        "",
        method(results),
        "",
    ]
    return "\n".join(lines)


def points(fraction: float) -> str:
    """`-0.013` as `-1.3`."""
    return f"{100 * fraction:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")


def megabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _row(name: str, r: Paired) -> str:
    return (
        f"| {name} | {r.baseline_accuracy:.1%} | {r.candidate_accuracy:.1%} | {points(r.difference)} "
        f"| {points(r.low)} to {points(r.high)} | {r.n} |"
    )

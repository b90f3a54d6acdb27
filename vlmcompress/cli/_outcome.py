"""What a verb returns, the exit codes of the command line, and texts that several verbs print, among them that of a plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.utils.messages import Check
from vlmcompress.utils.text import duration, size, smaller, table

if TYPE_CHECKING:
    from vlmcompress.models.data import Preview
    from vlmcompress.quantization.plan.plan import Plan
    from vlmcompress.recipe import Resolved

Outcome = tuple[int, Any, str]
"""Exit code, data for `--json`, text for human readers."""

OK, GATE, BAD_INPUT, INTERNAL, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 4, 130


def checks_text(title: str, findings: Sequence[Check]) -> str:
    """A title, a line per finding, and the number of problems, as text."""
    bad = sum(not finding.ok for finding in findings)
    rows = [("ok" if finding.ok else "PROBLEM", finding.name, finding.detail) for finding in findings]
    verdict = "no problem" if not bad else f"{bad} problem{'s' if bad > 1 else ''}"
    return f"{title}\n{table(rows)}\n{len(findings)} checks, {verdict}."


def written_text(done: Mapping[str, Any], lines: Sequence[str], verbose: bool, notes: Sequence[str] = ()) -> str:
    """The text of a run that wrote something.

    Args:
        done: the run's data for `--json`, with `out`, `seconds`, `timing` and `next`.
        lines: a description of the output.
        verbose: add the seconds of each phase.
        notes: lines before the suggested next commands.
    """
    seconds, timing = done["seconds"], done["timing"] if verbose else {}
    spent = {**timing, "other": seconds - sum(timing.values())} if verbose else {}
    phases = [
        f"  {'' if number else 'time':<9} {name:<18} {part:8.1f} s {part / max(seconds, 1e-9):5.0%}"
        for number, (name, part) in enumerate(spent.items())
    ]
    commands = ["Next:", *(f"  {command}" for command in done["next"])]
    return "\n".join([f"Wrote {done['out']} in {duration(done['seconds'])}.", *lines, *phases, *notes, *commands])


def evaluation_command(candidate: str | Path, baseline: str | Path, flags: str = "") -> str:
    """The command that evaluates a candidate against its baseline, with `--data FILE` except for demo models, which have data.

    Args:
        flags: further flags, quoted; empty, or beginning with a space.
    """
    from vlmcompress.models.data.sources import bundled_data

    data = "" if bundled_data(baseline, "test") or bundled_data(candidate, "test") else " --data FILE"
    return f"vlmcompress eval {shlex.quote(str(candidate))} --baseline {shlex.quote(str(baseline))}{flags}{data}"


def plan_data(plan: Plan, resolved: Resolved, preview: Preview | None) -> dict[str, Any]:
    """A plan as data for `--json`. `preview`: the calibration samples; None: not read."""
    return {
        **plan.to_dict(),
        "devices": plan.device_counts,
        "samples": preview.count if preview else None,
        "origins": resolved.origins,
    }


def plan_text(plan: Plan, resolved: Resolved, preview: Preview | None) -> str:
    """A plan as text: settings with their origins, layers, sizes. `preview`: the calibration samples; None: not read."""
    flat = {key: value for key, value in _flat(plan.recipe.plain()).items() if value is not None}
    settings = [
        (key, value if isinstance(value, str) else json.dumps(value), resolved.origin(key))
        for key, value in flat.items()
    ]
    rows: list[tuple] = [("part", "group", "format", "blocks", "layers [out, in]")]
    for row in plan.rows:
        group = f"{row.group}, of {row.experts} experts" if row.experts else row.group
        layers = ", ".join(f"{name} {list(shape)}" for name, shape in zip(row.linears, row.shapes, strict=True))
        rows.append((row.part, group, row.format, row.blocks, layers))
    calibrate, data = plan.recipe.calibrate, "no data needed"
    if plan.needs_data or (calibrate.data and plan.reads_data):
        data = f"{preview.count} samples; {preview.text}" if preview else f"at most {calibrate.samples} samples"
    ratio = "as they are"
    if plan.bytes_after != plan.bytes_before:
        ratio = smaller(plan.bytes_before, max(plan.bytes_after, 1))
    totals = [
        ("weights", f"{size(plan.bytes_before)} -> {size(plan.bytes_after)} ({ratio})"),
        *([("images", plan.visual_tokens.text)] if plan.visual_tokens else []),
        ("peak memory", f"about {size(plan.peak_bytes)}"),
        ("calibration", data),
        ("devices", devices_text(plan.device_counts)),
        (
            "prefix",
            "quantized: blocks are solved after quantized ones" if plan.observes else "none: nothing is observed",
        ),
    ]
    lines = [f"Recipe for {plan.recipe.plain()['model']} ({plan.source.spec.family})", table(settings)]
    lines.append(f"\nWhat is quantized: {f'{plan.linear_layers} linear layers' if plan.rows else 'nothing'}")
    lines += [
        *([table(rows)] if plan.rows else []),
        "",
        table(totals),
        *(["\nCalibration decides the widths of groups."] if plan.budget else []),
    ]
    return "\n".join([*lines, "\nOf the model nothing was read but headers, and nothing written."])


def devices_text(choices: Sequence[int]) -> str:
    """The numbers of devices that vLLM can split a checkpoint over, as text."""
    return f"{' or '.join(map(str, choices))} can share it in vLLM (check --tp N says why not N)"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif value not in ({}, []):
            flat[f"{prefix}{key}"] = value
    return flat

"""What a recipe would do to a model, as text and as data: for `check` and `quantize --dry-run`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmcompress.utils.text import size, smaller, table

if TYPE_CHECKING:
    from vlmcompress.models.data import Preview
    from vlmcompress.quantization.plan.plan import Plan
    from vlmcompress.recipe import Resolved


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
            "quantized: blocks are solved after quantized ones" if plan.observed_after else "none: nothing is observed",
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

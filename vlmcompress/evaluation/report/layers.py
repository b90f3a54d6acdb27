"""`vlmcompress report --errors`: errors of layers as JSON data and as text.

For one checkpoint the worst layers, for two (`first`, `other`) also the changes by modality from the first to the other.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vlmcompress.evaluation.doctor import layer_errors
from vlmcompress.evaluation.doctor.layer_errors import Change, LayerErrors
from vlmcompress.export.manifest import OF_OUTPUTS, OF_WEIGHTS, error_kind
from vlmcompress.utils.text import figures, percentage, table, times

CACHE = "FP8 cache: largest keys and values, shares that scales of the other kind of token would clip, rounding errors"
ADVICE = "Errors by modality need calibration data: quantize with --calib FOLDER."


def layer_errors_json(first: LayerErrors, other: LayerErrors | None = None) -> dict[str, Any]:
    """All errors and changes as JSON data, worst layers first."""
    if other is None:
        layers = [{"layer": n, "error": dict(first.errors[n])} for n in layer_errors.worst_first(first)]
        return {**_described(first), "summary": layer_errors.summarize_errors(first), "layers": layers}
    changes = layer_errors.compare_errors(first, other)
    layers = []
    for name in layer_errors.worst_first(first, other):
        before, after = first.errors.get(name, {}), other.errors.get(name, {})
        ratios = {kind: layer_errors.ratio(before[kind], after[kind]) for kind in before if kind in after}
        layers.append({"layer": name, "error": dict(before), "other": dict(after), "ratio": ratios})
    return {
        **_described(first),
        "summary": layer_errors.summarize_errors(first),
        "other": {**_described(other), "summary": layer_errors.summarize_errors(other)},
        "change": {kind: asdict(change) for kind, change in changes.items()},
        "differences": layer_errors.comparison_problems(first, other),
        "layers": layers,
    }


def _described(errors: LayerErrors) -> dict[str, Any]:
    maxima = {"mean": layer_errors.owners(errors), "groups": dict(errors.maxima)} if errors.maxima else None
    about = {"checkpoint": errors.name, "measured": errors.measured, "calibration": dict(errors.basis) or None}
    return {**about, "notes": list(errors.notes), "maxima": maxima, "kv_cache": dict(errors.kv_cache) or None}


def layers_text(first: LayerErrors, other: LayerErrors | None, top: int) -> str:
    """For a terminal: a summary, then the `top` worst layers (0: all)."""
    checkpoints = [first] if other is None else [first, other]
    kinds, layers = layer_errors.kinds(*checkpoints), layer_errors.worst_first(*checkpoints)
    worst = layers[: top or None]
    count = f"{len(layers)} layers, worst first"
    if len(worst) < len(layers):
        count = f"worst {len(worst)} of {len(layers)} layers"
    rows: list[tuple[str, ...]] = [("layer", *map(error_kind, kinds))]
    rows += [(layer, *(_cell(layer, kind, first, other) for kind in kinds)) for layer in worst]
    parts = [_summary(first) if other is None else _changes(first, other), f"{count}\n{table(rows)}"]
    parts += [f"{errors.name}: {CACHE}\n{table(cache(errors, top))}" for errors in checkpoints if errors.kv_cache]
    if not all(errors.basis for errors in checkpoints):
        parts.append(ADVICE)
    return "\n\n".join(parts)


def _summary(errors: LayerErrors) -> str:
    rows = [("", "mean", "median", "worst", "")]
    for kind, facts in layer_errors.summarize_errors(errors).items():
        worst = facts["worst"]
        shares = map(percentage, (facts["mean"], facts["median"], worst["error"]))
        rows.append((error_kind(kind), *shares, worst["layer"]))
    lines = [
        f"{errors.name}: {OF_OUTPUTS if errors.basis else OF_WEIGHTS}",
        f"Measured on {errors.measured}.",
        table(rows),
    ]
    return "\n".join([*lines, *largest(errors), *errors.notes])


def _changes(first: LayerErrors, other: LayerErrors) -> str:
    changes = layer_errors.compare_errors(first, other)
    rows: list[tuple[str, ...]] = [("", "mean before", "after", "layer by layer", "layers better", "worse", "")]
    for kind, change in changes.items():
        factor = "" if change.ratio is None else times(change.ratio)
        means, counts = map(percentage, (change.before, change.after)), (str(change.better), str(change.worse))
        rows.append((error_kind(kind), *means, factor, *counts, verdict(change)))
    measure = OF_WEIGHTS if set(changes) == {"weight"} else OF_OUTPUTS
    lines = [f"{first.name} -> {other.name}: {measure}"]
    lines += dict.fromkeys(f"Measured on {errors.measured}." for errors in (first, other))
    notes = [f"Note: {line}." for line in layer_errors.comparison_problems(first, other)]
    notes += [f"{errors.name}: {line}" for errors in (first, other) for line in errors.notes]
    return "\n".join([*lines, table(rows), *largest(first if first.maxima else other), *notes])


def largest(errors: LayerErrors) -> list[str]:
    """A line on the modalities with the largest inputs; empty if that was not recorded."""
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in layer_errors.owners(errors).items())
    return [f"Largest inputs, by channel: {shares} tokens' (mean over {len(errors.maxima)} groups)."] if shares else []


def verdict(change: Change) -> str:
    """`gained` or `lost` if the errors fell or rose by more than 1%, else `as before`."""
    if change.ratio is None or abs(change.ratio - 1) < 0.01:
        return "as before"
    return "gained" if change.ratio < 1 else "lost"


def _cell(layer: str, kind: str, first: LayerErrors, other: LayerErrors | None) -> str:
    """A layer's error of one kind; for two checkpoints before, after and the factor between them."""
    before = first.errors.get(layer, {}).get(kind)
    text = "-" if before is None else percentage(before)
    if other is None:
        return text
    after = other.errors.get(layer, {}).get(kind)
    text += f" -> {'-' if after is None else percentage(after)}"
    factor = None if before is None or after is None else layer_errors.ratio(before, after)
    return text if factor is None else f"{text} ({times(factor)})"


def cache(errors: LayerErrors, top: int = 0) -> list[tuple[str, ...]]:
    """Rows on keys and values, sorted by how much scales of text tokens alone would clip; `top` of them (0: all)."""
    parts = [(layer, name, part) for layer, both in errors.kv_cache.items() for name, part in both.items()]
    parts.sort(key=lambda row: -max(share or 0.0 for share in row[2]["clipped"].values()))
    kinds = [kind for kind in layer_errors.KINDS if any(kind in part["maximum"] for _, _, part in parts)]
    head = ("", "", *(f"max {kind}" for kind in kinds), "vision clipped by text's", "text by vision's")
    rows = [(*head, *(f"error {kind}" for kind in kinds))]
    for layer, name, part in parts[: top or None]:
        maxima = (figures(part["maximum"][kind]) if kind in part["maximum"] else "-" for kind in kinds)
        clipped = ("-" if share is None else percentage(share) for share in part["clipped"].values())
        rounding = (percentage(part["error"][kind]) if kind in part["error"] else "-" for kind in kinds)
        rows.append((layer, {"k": "keys", "v": "values"}[name], *maxima, *clipped, *rounding))
    return rows

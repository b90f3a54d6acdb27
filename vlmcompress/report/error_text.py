"""Errors of layers as JSON data and for a terminal: the worst layers, and changes by modality between two checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vlmcompress.common.text import figures, percentage, table, times
from vlmcompress.diagnosis import layer_errors
from vlmcompress.diagnosis.layer_errors import Change, LayerErrors
from vlmcompress.report.words import MEASURE, OF_WEIGHTS, error_kind

CACHE = "FP8 cache: largest keys and values, shares that scales of the other kind of token would clip, rounding errors"
ADVICE = "Errors by modality need calibration data: add --stats STATS --model MODEL (see vlmcompress calibrate)."


def data(first: LayerErrors, other: LayerErrors | None = None) -> dict[str, Any]:
    """Collect all errors and changes as JSON data, worst layers first."""
    if other is None:
        layers = [{"layer": n, "error": dict(first.errors[n])} for n in layer_errors.worst_first(first)]
        return {**_described(first), "summary": layer_errors.summary(first), "layers": layers}
    changes = layer_errors.change(first, other)
    layers = []
    for name in layer_errors.worst_first(first, other):
        before, after = first.errors.get(name, {}), other.errors.get(name, {})
        ratios = {kind: layer_errors.ratio(before[kind], after[kind]) for kind in before if kind in after}
        layers.append({"layer": name, "error": dict(before), "other": dict(after), "ratio": ratios})
    return {
        **_described(first),
        "summary": layer_errors.summary(first),
        "other": {**_described(other), "summary": layer_errors.summary(other)},
        "change": {kind: asdict(change) for kind, change in changes.items()},
        "differences": layer_errors.differences(first, other),
        "layers": layers,
    }


def _described(found: LayerErrors) -> dict[str, Any]:
    return {
        "checkpoint": found.name,
        "measured": found.measured,
        "calibration": dict(found.basis) or None,
        "notes": list(found.notes),
        "maxima": {"mean": layer_errors.owners(found), "groups": dict(found.maxima)} if found.maxima else None,
        "kv_cache": dict(found.kv_cache) or None,
    }


def text(first: LayerErrors, other: LayerErrors | None, top: int) -> str:
    """Render for a terminal a summary, then the `top` worst layers (0: all)."""
    head = _one(first) if other is None else _two(first, other)
    layers = layer_errors.worst_first(*([first] if other is None else [first, other]))
    shown = layers[: top or None]
    rows = _rows(first, shown) if other is None else _pairs(first, other, shown)
    count = (
        f"worst {len(shown)} of {len(layers)} layers"
        if len(shown) < len(layers)
        else f"{len(layers)} layers, worst first"
    )
    parts = [head, f"{count}\n{table(rows)}"]
    parts += [f"{one.name}: {CACHE}\n{table(cache(one, top))}" for one in (first, other) if one and one.kv_cache]
    blind = [one for one in (first, other) if one is not None and not one.basis]
    return "\n\n".join([*parts, *([ADVICE] if blind else [])])


def cache(found: LayerErrors, top: int = 0) -> list[tuple[str, ...]]:
    """Make rows on keys and values, those first that scales of text tokens alone would clip most; `top` of them (0: all)."""
    parts = [(layer, name, part) for layer, both in found.kv_cache.items() for name, part in both.items()]
    parts.sort(key=lambda row: -max(share or 0.0 for share in row[2]["clipped"].values()))
    seen = [kind for kind in layer_errors.KINDS if any(kind in part["maximum"] for _, _, part in parts)]
    head = ("", "", *(f"max {kind}" for kind in seen), "vision clipped by text's", "text by vision's")
    rows = [(*head, *(f"error {kind}" for kind in seen))]
    for layer, name, part in parts[: top or None]:
        maxima = (figures(part["maximum"][kind]) if kind in part["maximum"] else "-" for kind in seen)
        clipped = ("-" if share is None else percentage(share) for share in part["clipped"].values())
        errors = (percentage(part["error"][kind]) if kind in part["error"] else "-" for kind in seen)
        rows.append((layer, {"k": "keys", "v": "values"}[name], *maxima, *clipped, *errors))
    return rows


def _one(found: LayerErrors) -> str:
    rows = [("", "mean", "median", "worst", "")]
    for kind, facts in layer_errors.summary(found).items():
        worst = facts["worst"]
        rows.append(
            (error_kind(kind), *map(percentage, (facts["mean"], facts["median"], worst["error"])), worst["layer"])
        )
    lines = [f"{found.name}: {MEASURE if found.basis else OF_WEIGHTS}", f"Measured on {found.measured}.", table(rows)]
    return "\n".join([*lines, *largest(found), *found.notes])


def _two(first: LayerErrors, other: LayerErrors) -> str:
    changes = layer_errors.change(first, other)
    rows: list[tuple[str, ...]] = [("", "mean before", "after", "layer by layer", "layers better", "worse", "")]
    for kind, found in changes.items():
        factor = "" if found.ratio is None else times(found.ratio)
        counts = str(found.better), str(found.worse)
        rows.append(
            (error_kind(kind), percentage(found.before), percentage(found.after), factor, *counts, verdict(found))
        )
    blind = set(changes) == {"weight"}
    lines = [f"{first.name} -> {other.name}: {OF_WEIGHTS if blind else MEASURE}"]
    lines += dict.fromkeys(f"Measured on {one.measured}." for one in (first, other))
    notes = [f"Note: {line}." for line in layer_errors.differences(first, other)]
    notes += [f"{one.name}: {line}" for one in (first, other) for line in one.notes]
    notes = [*largest(first), *notes] if first.maxima else [*largest(other), *notes]
    return "\n".join([*lines, table(rows), *notes])


def largest(found: LayerErrors) -> list[str]:
    """Render a line on the modalities that hold the largest inputs; empty where that was not recorded."""
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in layer_errors.owners(found).items())
    return [f"Largest inputs, by channel: {shares} tokens' (mean over {len(found.maxima)} groups)."] if shares else []


def verdict(found: Change) -> str:
    """Sum up a change: `gained` or `lost` where the errors fell or rose by more than a hundredth."""
    if found.ratio is None or abs(found.ratio - 1) < 0.01:
        return "as before"
    return "gained" if found.ratio < 1 else "lost"


def _rows(found: LayerErrors, layers: list[str]) -> list[tuple[str, ...]]:
    shown = layer_errors.kinds(found)
    head = ("layer", *map(error_kind, shown))
    return [head, *((name, *(_cell(found, name, kind) for kind in shown)) for name in layers)]


def _pairs(first: LayerErrors, other: LayerErrors, layers: list[str]) -> list[tuple[str, ...]]:
    shown = layer_errors.kinds(first, other)
    rows: list[tuple[str, ...]] = [("layer", *map(error_kind, shown))]
    for name in layers:
        cells = []
        for kind in shown:
            before, after = first.errors.get(name, {}).get(kind), other.errors.get(name, {}).get(kind)
            factor = None if before is None or after is None else layer_errors.ratio(before, after)
            added = "" if factor is None else f" ({times(factor)})"
            cells.append(f"{_cell(first, name, kind)} -> {_cell(other, name, kind)}{added}")
        rows.append((name, *cells))
    return rows


def _cell(found: LayerErrors, layer: str, kind: str) -> str:
    error = found.errors.get(layer, {}).get(kind)
    return "-" if error is None else percentage(error)

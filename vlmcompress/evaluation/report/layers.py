"""`vlmcompress report --errors`: the errors of a checkpoint's layers by modality, or what changed from one to another.

A layer's error is the squared error of its output relative to the output, `|X dW^T|^2 / |X W^T|^2`, over the calibration
tokens `X` of one modality; if a scheme rounds activations, their error (over a sample of tokens) is included. `quantize`
records it for every layer. For a scheme without data, only `|dW|^2 / |W|^2` is known, called `weight` here. For two
checkpoints, `ratio` is the other's error over the first's; the mean over layers is geometric, so that halving one error
compensates for doubling another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from vlmcompress.evaluation.report.sections import LAYERS
from vlmcompress.export import manifest
from vlmcompress.export.manifest import OF_OUTPUTS, OF_WEIGHTS, error_kind
from vlmcompress.numerics.statistics.balance import MODALITIES
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.text import percentage, table, times


@dataclass(frozen=True)
class LayerErrors:
    """The errors of one checkpoint's layers.

    Attributes:
        name: the folder's name.
        errors: linear layer -> kind (a modality, or `weight`) -> relative squared error.
        basis: the data that errors were measured on, as in a manifest's `calibration`; empty for errors of weights only.
        warnings: the manifest's.
        model: the original, as the manifest identifies it: family, source, hashes of its config and of its weights' headers.
        kv_cache: attention module -> `k` and `v` -> relative squared `error` in FP8 by modality; empty without scales.
    """

    name: str
    errors: Mapping[str, Mapping[str, float]]
    basis: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    kv_cache: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def measured(self) -> str:
        """The data that the errors were measured on, in words."""
        if not self.basis:
            return "the weights alone, as no calibration data were seen"
        prefix = {"float": "unquantized", "quantized": "quantized"}.get(self.basis.get("prefix", ""), "other")
        return f"{manifest.measured_text(self.basis)}, after {prefix} blocks"


def read_errors(folder: Path) -> LayerErrors:
    """Read the errors that a checkpoint's manifest records.

    Raises:
        UserError: not a checkpoint of ours, or no layer was quantized.
    """
    content = manifest.read_manifest(folder)
    errors = content["errors"]
    if not errors:
        raise UserError(f"no decoder layer of {folder} is quantized, so there is no error to report")
    manifest.verify_hashes(folder, content)
    # Errors of weights alone were not measured on the calibration data, whatever these were needed for.
    of_weights = all(set(error) <= {"weight"} for error in errors.values())
    basis = {} if of_weights else content["calibration"] or {}
    cache = content.get("kv_cache", {})
    return LayerErrors(folder.resolve().name, errors, basis, tuple(content["warnings"]), content["model"], cache)


def compare_errors(before: LayerErrors, after: LayerErrors) -> dict[str, dict[str, Any]]:
    """Compare two checkpoints: kind -> change of the errors over the layers that have such an error in both.

    A change has the mean error `before` and `after`; the geometric mean `ratio` of after / before, below 1 if the other is
    closer to the original, None if all are zero; and in how many layers the other's error is smaller (`better`) and larger
    (`worse`).

    Raises:
        UserError: they are of models of two families, or have no layer or no kind of error in common.
    """
    was, now = before.model.get("family"), after.model.get("family")
    if was != now:
        raise UserError(f"{before.name} is a {was} model and {after.name} a {now} model; compare two of one model")
    common = sorted(before.errors.keys() & after.errors.keys())
    if not common:
        raise UserError(f"{before.name} and {after.name} have no quantized layer in common; compare two of one model")
    if not (shared := _kinds(before, after)):
        without_basis = before if not before.basis else after
        raise UserError(
            f"{without_basis.name} has errors of weights only and the other has errors by modality; "
            "quantize both with --calib FOLDER"
        )
    changes = {}
    for kind in shared:
        both = [n for n in common if kind in before.errors[n] and kind in after.errors[n]]
        if not both:  # its tokens reached other layers of the one than of the other
            continue
        pairs = [(before.errors[n][kind], after.errors[n][kind]) for n in both]
        # The geometric mean, as errors of layers span decades and their ratios are what is compared.
        ratios = [b / a for a, b in pairs if a and b]
        changes[kind] = {
            "before": fmean(a for a, _ in pairs),
            "after": fmean(b for _, b in pairs),
            "ratio": geometric_mean(ratios) if ratios else None,
            "better": sum(b < a for a, b in pairs),
            "worse": sum(b > a for a, b in pairs),
        }
    return changes


def comparison_problems(before: LayerErrors, after: LayerErrors) -> list[str]:
    """Reasons why the errors of two checkpoints are not directly comparable; empty if they were measured in the same way."""
    reasons = []
    if any(before.model.get(key) != after.model.get(key) for key in ("config_sha256", "headers_sha256")):
        sources = f"'{before.model.get('source')}' and '{after.model.get('source')}'"
        reasons.append(f"they were made of two different originals, {sources}: a layer of one is not that of the other")
    if before.errors.keys() != after.errors.keys():
        other = len(before.errors.keys() ^ after.errors.keys())
        reasons.append(f"layers that only one of the two quantizes, and that are not compared: {other}")
    if before.basis and after.basis:
        if before.basis.get("sha256") != after.basis.get("sha256"):
            reasons.append("the two saw different calibration samples")
        if before.basis.get("prefix") != after.basis.get("prefix"):
            reasons.append("one was measured after quantized blocks, the other after unquantized ones")
    return reasons


def errors_json(*checkpoints: LayerErrors) -> dict[str, Any]:
    """All errors of one or two checkpoints as JSON data, the worst layer of any first, and what changed between two."""
    layers = [
        {"layer": n, "errors": [dict(c.errors.get(n, {})) for c in checkpoints]} for n in _worst_first(*checkpoints)
    ]
    described = [
        {
            "checkpoint": c.name,
            "measured": c.measured,
            "calibration": dict(c.basis) or None,
            "warnings": list(c.warnings),
            "mean": {kind: _mean(c, kind) for kind in _kinds(c)},
            "kv_cache": dict(c.kv_cache),
        }
        for c in checkpoints
    ]
    data: dict[str, Any] = {"checkpoints": described, "layers": layers}
    if len(checkpoints) == 2:
        data["change"] = compare_errors(*checkpoints)
        data["differences"] = comparison_problems(*checkpoints)
    return data


def errors_text(*checkpoints: LayerErrors) -> str:
    """For a terminal: what was measured, the mean over layers, the worst layers, and remarks, of one checkpoint or two."""
    kinds, layers = _kinds(*checkpoints), _worst_first(*checkpoints)
    rows = [(f"worst {min(LAYERS, len(layers))} of {len(layers)} layers", *map(error_kind, kinds))]
    notes = [f"{errors.name}: {line}" for errors in checkpoints for line in errors.warnings]
    if len(checkpoints) == 1:
        rows.append(("mean of all", *(percentage(_mean(checkpoints[0], kind)) for kind in kinds)))
    else:
        compared = compare_errors(*checkpoints)
        changes = [compared.get(kind) for kind in kinds]
        # The factor of the mean is that layer by layer: a few large layers would decide the ratio of the means.
        rows.append(("mean of all", *(_cell([c["before"], c["after"]], c["ratio"]) if c else "-" for c in changes)))
        rows.append(("better, worse layers", *(f"{c['better']}, {c['worse']}" if c else "-" for c in changes)))
        notes += [f"Note: {line}." for line in comparison_problems(*checkpoints)]
    for layer in layers[:LAYERS]:
        errors = [[checkpoint.errors.get(layer, {}).get(kind) for checkpoint in checkpoints] for kind in kinds]
        rows.append((layer, *(_cell(e, e[1] / e[0] if len(e) == 2 and e[0] and e[1] else None) for e in errors)))
    if not all(errors.basis for errors in checkpoints):
        notes.append("Errors by modality need calibration data: quantize with --calib FOLDER.")
    measure = OF_WEIGHTS if kinds == ["weight"] else OF_OUTPUTS
    title = f"{' -> '.join(errors.name for errors in checkpoints)}: {measure}"
    measured = dict.fromkeys(f"Measured on {errors.measured}." for errors in checkpoints)
    caches = [_cache_table(errors) for errors in checkpoints if errors.kv_cache]
    return "\n".join([title, *measured, table(rows), *caches, *notes])


def _cache_table(errors: LayerErrors) -> str:
    """What an FP8 KV cache with the checkpoint's scales changes, the worst attention modules first."""
    parts = {
        f"{name}, {part}": entry[key]["error"]
        for name, entry in errors.kv_cache.items()
        for key, part in (("k", "keys"), ("v", "values"))
    }
    worst = sorted(parts, key=lambda name: (-max(parts[name].values()), name))[:LAYERS]
    kinds = [kind for kind in MODALITIES if any(kind in error for error in parts.values())]
    rows = [(f"FP8 cache of {errors.name}, worst {len(worst)} of {len(parts)}", *map(error_kind, kinds))]
    rows += [(n, *(percentage(parts[n][kind]) if kind in parts[n] else "-" for kind in kinds)) for n in worst]
    return table(rows)


def _cell(errors: list[float | None], factor: float | None) -> str:
    """A layer's error, or before and after, such as `2.00% -> 1.00% (0.50x)`."""
    text = " -> ".join("-" if error is None else percentage(error) for error in errors)
    return text if factor is None else f"{text} ({times(factor)})"


def _kinds(*checkpoints: LayerErrors) -> list[str]:
    """The kinds of error that all of the checkpoints have."""
    of_each = [{kind for error in checkpoint.errors.values() for kind in error} for checkpoint in checkpoints]
    return [kind for kind in (*MODALITIES, "weight") if all(kind in kinds for kinds in of_each)]


def _mean(errors: LayerErrors, kind: str) -> float:
    return fmean(error[kind] for error in errors.errors.values() if kind in error)


def _worst_first(*checkpoints: LayerErrors) -> list[str]:
    """Sort layers by falling error, taking each layer's largest of any kind in any of the checkpoints."""
    most: dict[str, float] = {}
    for checkpoint in checkpoints:
        for layer, error in checkpoint.errors.items():
            most[layer] = max((most.get(layer, 0.0), *error.values()))
    return sorted(most, key=lambda layer: (-most[layer], layer))

"""The errors of a checkpoint's layers by modality, and what changed from one checkpoint to another.

A layer's error is the squared error of its output relative to the output, `|X dW^T|^2 / |X W^T|^2`, over the calibration
tokens `X` of one modality; if a scheme rounds activations, their error (over a sample of tokens) is included. `quantize`
records it for every layer. For a scheme without data, only `|dW|^2 / |W|^2` is known, called `weight` here. For two
checkpoints, `ratio` is the other's error over the first's; the mean over layers is geometric, so that halving one error
compensates for doubling another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vlmcompress.export import manifest
from vlmcompress.numerics.statistics.balance import MODALITIES
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

KINDS = (*MODALITIES, "weight")
"""Kinds of errors: of the output by modality, and of the weights themselves."""

ByKind = Mapping[str, float]


@dataclass(frozen=True)
class LayerErrors:
    """The errors of one checkpoint's layers.

    Attributes:
        name: the folder's name.
        errors: linear layer -> kind -> relative squared error.
        basis: the data that errors were measured on, as in a manifest's `calibration`; empty for errors of weights only.
        notes: remarks for the reader, a line each.
        kv_cache: attention module -> errors of an FP8 cache, see `statistics.kv_range`; empty without one.
        maxima: first linear layer of a group -> kind -> share of input channels whose maximum is in tokens of that kind; for
            schemes that quantize activations.
        model: the original, as the manifest identifies it: family, source, hashes of its config and of its weights' headers.
    """

    name: str
    errors: Mapping[str, ByKind]
    basis: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    kv_cache: Mapping[str, Any] = field(default_factory=dict)
    maxima: Mapping[str, ByKind] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> str:
        """The data that the errors were measured on, in words."""
        if not self.basis:
            return "the weights alone, as no calibration data were seen"
        prefix = {"float": "unquantized", "quantized": "quantized"}.get(self.basis.get("prefix", ""), "other")
        return f"{manifest.measured_text(self.basis)}, after {prefix} blocks"


@dataclass(frozen=True)
class Change:
    """The errors of one kind in two checkpoints, over the layers that both have.

    Attributes:
        before, after: mean error of the first and of the other.
        ratio: geometric mean of after / before; below 1 the other is closer to the original. None if an error is zero.
        better, worse: layers in which the other's error is smaller, and larger.
    """

    before: float
    after: float
    ratio: float | None
    better: int
    worse: int


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
    basis = content["calibration"] or {}
    # Errors of weights alone were not measured on the calibration data, whatever these were needed for.
    if all(set(error) <= {"weight"} for error in errors.values()):
        basis = {}
    notes = [*content["warnings"], *few(basis, folder)]
    cache, maxima = content.get("kv_cache", {}), content.get("maxima", {})
    return LayerErrors(folder.resolve().name, errors, basis, notes, cache, maxima, content["model"])


def kinds(*errors: LayerErrors) -> list[str]:
    """The kinds of error that all of the checkpoints have."""
    kinds_of_each = [{kind for error in layers.errors.values() for kind in error} for layers in errors]
    return [kind for kind in KINDS if all(kind in layers for layers in kinds_of_each)]


def summarize_errors(errors: LayerErrors) -> dict[str, dict[str, Any]]:
    """Statistics of errors over layers: kind -> mean, median, and the worst layer."""
    result = {}
    for kind in kinds(errors):
        values = {layer: error[kind] for layer, error in errors.errors.items() if kind in error}
        worst = max(values, key=lambda layer: (values[layer], layer))
        result[kind] = {
            "mean": fmean(values.values()),
            "median": median(values.values()),
            "worst": {"layer": worst, "error": values[worst]},
            "layers": len(values),
        }
    return result


def owners(errors: LayerErrors) -> dict[str, float]:
    """Kind of token -> share of input channels whose maximum is in tokens of that kind, averaged over groups of layers."""
    present = [kind for kind in KINDS if any(kind in shares for shares in errors.maxima.values())]
    return {kind: fmean(shares.get(kind, 0.0) for shares in errors.maxima.values()) for kind in present}


def compare_errors(before: LayerErrors, after: LayerErrors) -> dict[str, Change]:
    """Compare two checkpoints: kind -> change of the errors.

    Raises:
        UserError: they are of models of two families, or have no layer or no kind of error in common.
    """
    was, now = before.model.get("family"), after.model.get("family")
    if was != now:
        raise UserError(f"{before.name} is a {was} model and {after.name} a {now} model; compare two of one model")
    common = before.errors.keys() & after.errors.keys()
    shared = kinds(before, after)
    if not common:
        raise UserError(f"{before.name} and {after.name} have no quantized layer in common; compare two of one model")
    if not shared:
        without_basis = before if not before.basis else after
        raise UserError(
            f"{without_basis.name} has errors of weights only and the other has errors by modality; "
            "quantize both with --calib FOLDER"
        )
    result = {}
    for kind in shared:
        pairs = [(before.errors[n][kind], after.errors[n][kind]) for n in sorted(common) if kind in before.errors[n]]
        # The geometric mean, as errors of layers span decades and their ratios are what is compared.
        result[kind] = Change(
            fmean(a for a, _ in pairs),
            fmean(b for _, b in pairs),
            geometric_mean(ratio(a, b) for a, b in pairs),
            sum(b < a for a, b in pairs),
            sum(b > a for a, b in pairs),
        )
    return result


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


def worst_first(*errors: LayerErrors) -> list[str]:
    """Sort layers by falling error, taking each layer's largest of any kind in any of the checkpoints."""
    most: dict[str, float] = {}
    for layers in errors:
        for layer, error in layers.errors.items():
            most[layer] = max(most.get(layer, 0.0), *error.values())
    return sorted(most, key=lambda layer: (-most[layer], layer))


def ratio(before: float, after: float) -> float | None:
    """The ratio `after / before`; None if one of them is zero."""
    return after / before if before > 0 and after > 0 else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that are not None; None if there are none."""
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(fmean(logs)) if logs else None


def few(basis: Mapping[str, Any], folder: Path) -> list[str]:
    """A warning for errors measured on the calibration tokens, if they are fewer than a layer has inputs, to which a solver
    overfits; else empty."""
    if basis.get("held_out"):
        return []
    try:
        config = json_files.read(folder / "config.json")
        width = int((config.get("text_config") or config)["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    # With fewer samples than inputs the Gram matrix is singular: a solver drives these errors down and others up.
    few = {kind: n for kind, n in (basis.get("tokens") or {}).items() if 0 < n < width}
    if not few:
        return []
    counts = " and ".join(f"{n} {kind}" for kind, n in few.items())
    return [
        f"only {counts} tokens were seen, fewer than the {width} inputs of a layer: on others the error is larger; "
        "take more --samples"
    ]

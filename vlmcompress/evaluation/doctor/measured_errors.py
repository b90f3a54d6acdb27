"""Measure the errors of a finished checkpoint's layers from statistics of the original: no model is run.

The weights `Q` of a layer are read back and compared with the original's. If a scheme smooths, the layer's input is divided by
some `s [in]`, and its error is `Q / s - W`. `s` is not stored, but follows from the operation before the layer. A norm's weight
was divided by it, so that the quotient of the norm's weights is exact, including the norm's rounding. The rows of a linear
layer were divided and then quantized, so that `s` is an estimate, and the errors of the layers that read its output are off
by up to 5% (observed with AWQ). The error of that linear layer itself is measured before the division, with its channels in
their original scale.

The statistics may be those of the calibration, or of other samples, whose errors then are those on new data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress import models
from vlmcompress.evaluation.doctor import layer_errors
from vlmcompress.evaluation.doctor.layer_errors import LayerErrors
from vlmcompress.export import manifest
from vlmcompress.export.stored import Stored
from vlmcompress.models import Group, Source
from vlmcompress.models.devices import accelerator, full_float32
from vlmcompress.numerics import Scheme, round_activations
from vlmcompress.quantization.calibration.statistics_folder import Statistics
from vlmcompress.utils import identity, tensor_files
from vlmcompress.utils.errors import UserError

_ROWS = 256  # most rows of a weight, as when quantizing
_KEYS = ("config_sha256", "headers_sha256")


@full_float32()
def measure(folder: Path, statistics: Statistics, model: Path) -> LayerErrors:
    """Measure the errors of the checkpoint in `folder`, whose original is in `model`.

    Raises:
        UserError: the three don't match, or the statistics have no Gram matrix of a quantized layer.
    """
    recorded = layer_errors.read_errors(folder)
    content, now = manifest.read_manifest(folder), identity.source_identity(model)
    if any(content["model"][key] != now[key] for key in _KEYS):
        raise UserError(f"{folder} was made of another model than {model}; give the one it was made of with --model")
    if content["recipe"].get("rotate") or statistics.rotation:
        raise UserError(f"{folder}: layers of a rotated model can't be compared with the original's; leave out --stats")
    if problems := statistics.other_model(model):
        raise UserError(problems[0])
    if "gram" not in statistics.facts["needs"]:
        raise UserError(f"statistics {statistics.folder} have no Gram matrices; calibrate with --needs gram")
    device = accelerator() or torch.device("cpu")
    before, after = Weights(model, device), Weights(folder, device)
    blocks: dict[int, list[Group]] = {}
    for group in before.groups:
        if any(after.scheme(name) for name in group.linears):
            blocks.setdefault(group.layer, []).append(group)
    errors: dict[str, Mapping[str, float]] = {}
    smoothed = after.smoothed(before)
    for layer, groups in blocks.items():
        stats = statistics.load(layer, str(device))[0]
        if absent := next((group.linears[0] for group in groups if group.name not in stats), None):
            raise UserError(f"statistics {statistics.folder} have none of {absent}; calibrate again")
        weights, inputs = restored(groups, before, after) if smoothed else ({}, {})
        group_stats = {name: stats[group.name] for group in groups for name in group.linears if after.scheme(name)}
        for name, layer_stats in group_stats.items():
            w, q = before.weight(name), weights[name] if smoothed else after.weight(name)
            step = math.ceil(len(w) / _ROWS)
            q, w, scale, rounded = q[::step], w[::step], inputs.get(name), after.rounding(name)
            error = layer_stats.error(q - w, w)
            if rounded is not None:  # the engine rounds inputs that were divided by `scale`
                rescaled = layer_stats if scale is None else layer_stats.rescaled(scale)
                q, w = (x if scale is None else x * scale for x in (q, w))
                for modality, added in rescaled.rounding_error(q, w, rounded).items():
                    error[modality] += added
            errors[name] = error
    notes = [*content["warnings"], *layer_errors.few(statistics.origin, folder)]
    return replace(recorded, errors=errors, basis=statistics.origin, notes=notes)


class Weights:
    """The weights of a checkpoint, unquantized or in any format, by memory name and with the values that an engine uses.

    Args:
        folder: the checkpoint's folder.
        device: device of the tensors; None: the CPU.
    """

    def __init__(self, folder: Path, device: torch.device | None = None):
        self.device = device
        block = models.read_config(folder).get("quantization_config")
        self.stored = Stored.of(folder) if block and block.get("config_groups") != {} else None
        source = self.stored or Source.of(folder)
        self.meta_model, self.spec, self.names = source.meta_model, source.spec, source.names
        self.groups = models.resolve_groups(self.meta_model, self.spec)
        self.entries = models.stored_tensors(folder)

    def scheme(self, linear: str) -> Scheme | None:
        """The number formats of a linear layer; None where it is not quantized."""
        return self.stored.schemes.get(linear) if self.stored else None

    def parameter(self, name: str) -> Tensor:
        """An unquantized tensor as float32."""
        return tensor_files.read_tensor(self.entries[self.names[name]]).to(self.device).float()

    def weight(self, linear: str) -> Tensor:
        """The weight `[out, in]` of a linear layer, dequantized to float32."""
        if self.stored is None or linear not in self.stored:
            return self.parameter(f"{linear}.weight")
        codes = self.stored[linear][0]
        tensors: dict[str, Any] = {
            name: value.to(self.device) for name, value in vars(codes).items() if isinstance(value, Tensor)
        }
        return replace(codes, **tensors).dequantize(torch.float32)

    def rounding(self, linear: str) -> Callable[[Tensor], Tensor] | None:
        """The function by which an engine rounds the rows of a layer's input; None: no rounding."""
        scheme = self.scheme(linear)
        if self.stored is None or scheme is None or scheme.activations is None:
            return None
        scale = self.stored[linear][2] if scheme.activations.calibrated else None
        scale = None if scale is None else scale.to(self.device)
        return functools.partial(round_activations, fmt=scheme.activations, scale=scale)

    def norm(self, name: str) -> Tensor:
        """The factors by which a norm multiplies each channel, float32."""
        return self.parameter(f"{name}.weight") + self.spec.norm_offset

    def smoothed(self, original: Weights) -> bool:
        """Whether some norm before a group of linear layers is not the original's."""
        norms = {group.smooth for group in self.groups if group.smooth and group.smooth_kind == "norm"}
        return any(not torch.equal(self.norm(name), original.norm(name)) for name in norms)


def restored(groups: Sequence[Group], before: Weights, after: Weights) -> tuple[dict, dict]:
    """A block's quantized weights `[out, in]` by linear layer, with smoothing undone, to be compared with the
    original's; and the scale `[in]` that the layer's input was divided by, for layers that were smoothed."""
    weights = {name: after.weight(name) for group in groups for name in group.linears}
    inputs: dict[str, Tensor] = {}  # linear layer -> scale that its input was divided by
    for group in groups:
        if group.smooth is None:
            continue
        if group.smooth_kind == "norm":
            old, new = before.norm(group.smooth), after.norm(group.smooth)
            # the norm was divided by s, so s = old / new; a zero channel has no s and does not matter
            inputs |= dict.fromkeys(group.linears, torch.where(new == 0, 1.0, old / new))
        elif group.smooth in weights and after.scheme(group.smooth) is not None:
            old = before.weight(group.smooth) * inputs.get(group.smooth, 1.0)
            scale = _between(old, weights[group.smooth], [(before.weight(n), weights[n]) for n in group.linears])
            weights[group.smooth] = weights[group.smooth] * scale[:, None]
            inputs |= dict.fromkeys(group.linears, scale)
    return {name: weight / inputs[name] if name in inputs else weight for name, weight in weights.items()}, inputs


def _between(op: Tensor, rounded: Tensor, readers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Estimate the scale that moved from the rows of a linear layer `[channels, in]` into the columns of its readers, each
    before and after `[out, channels]`: the geometric mean of the least-squares estimates of both sides, as clipping biases
    them oppositely."""
    divided = (op * rounded).sum(1) / op.square().sum(1)  # [channels], about 1 / s
    old, new = (torch.cat(side) for side in zip(*readers, strict=True))
    multiplied = (old * new).sum(0) / old.square().sum(0)  # about s
    scale = (multiplied / divided).sqrt()
    return torch.where(scale.isfinite() & (scale > 0), scale, 1.0)

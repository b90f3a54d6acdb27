"""Decide what one decoder block becomes. Pure: weights and statistics in, `LayerResult` out; no model, no IO.

A block's linear layers come in groups that read the same input. First every group may be *smoothed* (AWQ,
SmoothQuant): its weights are multiplied per input channel by `s` and the op before it divided by `s`, which changes
nothing in exact arithmetic. Then each weight is quantized with the statistics of the smoothed input, which follow
from those of the plain input in closed form (`GroupStats.rescaled`). So one pass over the calibration data serves
both steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vlmcompress import quantizers
from vlmcompress.models import Group
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.stats import GroupStats


@dataclass(frozen=True)
class Method:
    """A scheme with its options: what is done to every group of the decoder."""

    module: ModuleType
    options: Any

    @property
    def needs(self) -> frozenset[str]:
        """Statistics that the method reads; empty for a data-free one."""
        return self.module.NEEDS

    @property
    def scheme(self) -> Scheme | None:
        """Number formats of the result; None: the weights stay as they are."""
        return self.module.scheme(self.options)

    @property
    def by_block(self) -> bool:
        """Whether llm-compressor's search by block output smooths the model beforehand (`objective: block`)."""
        return getattr(self.options, "objective", None) == "block"


@dataclass
class LayerResult:
    """Everything that changes in one decoder block, by memory name of the module.

    Attributes:
        smoothing: op -> s `[channels]`: its output is divided by s (the weights that read it are multiplied already).
        weights: linear -> its quantized weight.
        input_scales: linear -> static activation scale, scalar.
        kv_scales: attention module -> `[2]` scales of keys and values.
        errors: linear -> modality -> relative squared output error `|X dW^T|^2 / |X W^T|^2`; `weight` without data.
    """

    smoothing: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, QTensor] = field(default_factory=dict)
    input_scales: dict[str, Tensor] = field(default_factory=dict)
    kv_scales: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)


def solve_layer(
    groups: Sequence[Group],
    weights: Mapping[str, Tensor],
    stats: Mapping[str, GroupStats],
    method: Method,
    scale_dtype: torch.dtype,
) -> LayerResult:
    """Smooth and quantize the groups of one block.

    Args:
        groups: the groups to quantize, in the order in which data flows through them.
        weights: linear -> weight `[out, in]`, any float dtype; not modified.
        stats: group name -> statistics of its input. Empty for data-free methods.
        scale_dtype: the dtype in which group scales are stored (that of the model).
    """
    result = LayerResult()
    current = {name: weights[name].float() for group in groups for name in group.linears}
    current_stats = dict(stats)
    for group in groups:
        scale = _smoothing_scale(group, current, current_stats.get(group.name), method, scale_dtype)
        if scale is None:
            continue
        assert group.smooth is not None
        result.smoothing[group.smooth] = scale
        current_stats[group.name] = current_stats[group.name].rescaled(scale)
        for name in group.linears:
            current[name] = current[name] * scale
        if group.smooth in current:
            current[group.smooth] = current[group.smooth] / scale[:, None]
    for group in groups:
        own = [current[name] for name in group.linears]
        group_stats = current_stats.get(group.name)
        solution = quantizers.solve(method.module, own, group_stats, method.options, scale_dtype)
        for name, weight, quantized in zip(group.linears, own, solution.weights, strict=True):
            result.weights[name] = quantized
            result.errors[name] = _error(weight, quantized, group_stats)
            if solution.input_scale is not None:
                result.input_scales[name] = solution.input_scale
    return result


def _smoothing_scale(
    group: Group, weights: Mapping[str, Tensor], stats: GroupStats | None, method: Method, scale_dtype: torch.dtype
) -> Tensor | None:
    if stats is None or group.smooth is None or method.by_block:
        return None
    if group.smooth_kind == "linear" and group.smooth not in weights:
        return None  # the op before it is left as it is, so there is nothing to fold into
    own = [weights[name] for name in group.linears]
    return quantizers.smooth(method.module, own, stats, method.options, scale_dtype)


def _error(weight: Tensor, quantized: QTensor, stats: GroupStats | None) -> dict[str, float]:
    """Relative squared error of the output by modality; of the weight itself where no data was seen."""
    difference = quantized.dequantize(torch.float32) - weight
    if stats is not None and "gram" in stats.needs:
        return stats.error(difference, weight)
    return {"weight": float(difference.square().sum() / weight.square().sum().clamp_min(1e-30))}


@torch.no_grad()
def apply(result: LayerResult, modules: Mapping[str, Any]) -> None:
    """Put a block's result into the model: divide the smoothed ops, replace weights by their dequantized values."""
    for name, scale in result.smoothing.items():
        for parameter in modules[name].parameters(recurse=False):
            shape = (-1,) + (1,) * (parameter.dim() - 1)
            parameter.copy_(parameter.float() / scale.to(parameter.device).view(shape))
    for name, quantized in result.weights.items():
        weight = modules[name].weight
        weight.copy_(quantized.dequantize(weight.dtype))

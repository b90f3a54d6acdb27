"""Smooth and quantize one decoder block. Pure: weights and statistics in, `BlockResult` out; no model, no IO.

A block's linear layers come in groups that read the same input. First every group may be *smoothed* (AWQ,
SmoothQuant): its weights are multiplied per input channel by `s` and the op before it divided by `s`, which changes
nothing in exact arithmetic. A norm's weight is stored in 16 bits, so weights are multiplied by the `s` that results from
rounding the divided norm. Then each weight is quantized with the statistics of the smoothed input, which follow from those of
the plain input in closed form (`GroupStats.rescaled`), so one pass over the calibration data serves both steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.models import HEAD, Group
from vlmcompress.numerics import ActFormat, Format, QTensor, Scheme, round_activations
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization import schemes
from vlmcompress.quantization.schemes import Needs, Quantizer, QuantizerOptions, Smoothing
from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import SCHEMES

FEW = "experts with few routed tokens were calibrated on other tokens of their layer as well (--all-experts gives all to each)"
_ROWS = 256  # most rows of a weight in a layer's reported error


@dataclass(frozen=True)
class QuantMethod:
    """A scheme with its options, for every group of the decoder except those in `others`.

    Attributes:
        others: (block, group name) -> method of a group with another scheme.
        scale_dtype: dtype of scales in the written format; None: that of the weights.
    """

    quantizer: Quantizer[Any]
    options: QuantizerOptions
    others: Mapping[tuple[int, str], QuantMethod] = field(default_factory=dict)
    scale_dtype: torch.dtype | None = None

    @classmethod
    def named(cls, scheme: str, scale_dtype: torch.dtype | None = None, **options: Any) -> QuantMethod:
        """The method of a scheme's name; options that are not set are the scheme's defaults."""
        quantizer = SCHEMES.get(scheme)
        return cls(quantizer, quantizer.OPTIONS(**options), scale_dtype=scale_dtype)

    def of(self, group: Group) -> QuantMethod:
        """The method for a group."""
        return self.others.get((group.layer, group.name), self)

    @property
    def needs(self) -> Needs:
        """What the scheme requires from a run, including gradients for its balance, and the statistics of `others`."""
        needs = self.quantizer.needs(self.options)
        gradient = {"gradient"} if self.options.balance == "mbq" else set()
        others = (other.needs.statistics for other in self.others.values())
        return replace(needs, statistics=needs.statistics.union(gradient, *others))

    @property
    def scheme(self) -> Scheme | None:
        """Number formats of the result, except `others`; None: the weights are not quantized."""
        return self.quantizer.scheme(self.options)

    @property
    def rounds_inputs(self) -> bool:
        """Whether an engine rounds the inputs of some layers."""
        parts = (self.scheme, *(other.scheme for other in self.others.values()))
        return any(scheme and scheme.activations for scheme in parts)


@dataclass
class BlockResult:
    """All changes to one decoder block, by memory name of the module.

    Attributes:
        smoothing: op -> s `[channels]`: its output is divided by s (the weights that read it are multiplied already).
        multiplied: 16-bit layer that reads such an output -> s: the columns of its weight have to be multiplied by s.
        weights: linear -> its quantized weight.
        input_scales: linear -> static activation scale, scalar; for NVFP4 activations their global scale.
        kv_ranges: attention module -> ranges of its keys and values, see `vlmcompress.numerics.statistics.kv_range`.
        errors: linear -> modality -> relative squared output error `|X dW^T|^2 / |X W^T|^2`, over at most 256 evenly spaced
            output channels, including the rounding of `X` if the scheme rounds inputs; without data `weight` -> error of
            these channels' weights.
        maxima: first linear of a group -> modality -> share of input channels whose maximum it holds; empty if maxima were not
            collected.
        warnings: deviations from what was asked for: (what, first linear of the group, details).
    """

    smoothing: dict[str, Tensor] = field(default_factory=dict)
    multiplied: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, QTensor] = field(default_factory=dict)
    input_scales: dict[str, Tensor] = field(default_factory=dict)
    kv_ranges: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    maxima: dict[str, dict[str, float]] = field(default_factory=dict)
    warnings: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, other: BlockResult) -> None:
        """Add the changes of another part of the block."""
        for attribute in fields(self):
            if attribute.name != "warnings":
                getattr(self, attribute.name).update(getattr(other, attribute.name))
        self.warnings += other.warnings


def solve_block(
    groups: Sequence[Group],
    weights: Mapping[str, Tensor],
    stats: MutableMapping[str, GroupStats],
    method: QuantMethod,
    scale_dtype: torch.dtype,
    scales: Mapping[str, Tensor | None] | None = None,
    norms: Mapping[str, Tensor] | None = None,
    norm_offset: float = 0.0,
) -> BlockResult:
    """Smooth and quantize the groups of one block.

    Args:
        groups: the groups to quantize, in the order in which data flows through them.
        weights: linear -> weight `[out, in]`, any float dtype; not modified.
        stats: group name -> statistics of its input; empty for data-free methods. Entries are removed once used, as they are
            large.
        scale_dtype: the dtype in which group scales are stored (that of the model).
        scales: group name -> smoothing scale `[in]` from an earlier search; None: the group is not smoothed.
        norms: norm -> its weight `[channels]` in its stored dtype; norms left out are divided exactly.
        norm_offset: norms compute `x * (norm_offset + weight)`.

    Raises:
        UserError: a weight or its statistics hold NaN or Inf, or statistics that the method needs are missing.
    """
    result, factors, data_free = BlockResult(), dict[str, list[Tensor]](), not stats

    def current(group: Group) -> list[Tensor]:
        """A group's weights as smoothed so far, in float32; computed on each use, as copies of all would double the memory."""
        if data_free:  # rounding to nearest converts a few rows at a time
            return [weights[name] for name in group.linears]
        return [math.prod(factors.get(name, ()), start=weights[name].float()) for name in group.linears]

    # A scale is folded into the op before: a norm, or a linear layer, if that is quantized afterwards.
    linears = {name for group in groups for name in group.linears}
    foldable = [
        group
        for group in groups
        if group.name in stats and group.smooth and (group.smooth_kind != "linear" or group.smooth in linears)
    ]
    mine = [group.name for group in distributed.shard(groups)]
    # Scales are searched on weights that other groups' scales have not changed, so workers can share the searches. Each worker
    # searches for the groups that it solves, and reuses the factorizations of these searches.
    searched: dict[str, Smoothing] = {}
    for group in foldable:
        chosen = method.of(group)
        if group.name not in mine:
            continue
        if chosen.needs.block_scales:
            searched[group.name] = Smoothing((scales or {}).get(group.name))
            continue
        group_weights = current(group)
        with naming_layers(group.linears, group_weights):
            searched[group.name] = schemes.smooth(
                chosen.quantizer, group_weights, stats[group.name], chosen.options, scale_dtype
            )
    smoothing_scales = distributed.merge_dicts({name: smoothing.scale for name, smoothing in searched.items()})
    for group in foldable:
        scale = smoothing_scales[group.name]
        if scale is None:
            continue
        assert group.smooth is not None
        if norms and group.smooth in norms:
            # The norm's weight g / s is rounded to 16 bits. Weights are multiplied by g divided by that rounded value instead
            # of by s, so the two cancel and rounding the norm costs no accuracy.
            norm = norms[group.smooth]
            exact, old = scale.to(norm.device), norm.float() + norm_offset
            stored = old / (_divided(norm, exact, norm_offset).float() + norm_offset)
            scale = torch.where(stored.isfinite() & (stored > 0), stored, exact).to(scale.device)
        result.smoothing[group.smooth] = scale
        result.multiplied |= dict.fromkeys(group.kept, scale)
        stats[group.name] = stats[group.name].rescaled(scale)
        # W diag(s), and for a linear layer before it diag(1/s) W, which is rounded with its own group.
        for name in group.linears:
            factors.setdefault(name, []).append(scale)
        factors.setdefault(group.smooth, []).append(1 / scale[:, None])
    solved: dict[str, BlockResult] = {}
    for group in groups:
        group_stats = stats.pop(group.name, None)
        if group.name in mine:
            factorization = searched.pop(group.name, Smoothing()).factorization  # as large as the Gram matrix
            solved[group.name] = _solve_group(
                group, current(group), group_stats, method.of(group), scale_dtype, factorization
            )
    solved = distributed.merge_dicts(solved, (BlockResult, QTensor, Format))
    for group in groups:
        result.add(solved[group.name])
    return result


def _solve_group(
    group: Group,
    weights: list[Tensor],
    stats: GroupStats | None,
    method: QuantMethod,
    scale_dtype: torch.dtype,
    factorization: Any,
) -> BlockResult:
    """Quantize the layers of one group, whose `weights [out_i, in]` and statistics are smoothed already."""
    result, first = BlockResult(), group.linears[0]
    if stats is not None and "absmax" in stats.needs:
        result.maxima[first] = stats.owners()
    with naming_layers(group.linears, weights):
        solution = schemes.solve(method.quantizer, weights, stats, method.options, scale_dtype, factorization)
    result.warnings += [(what, first, detail) for what, detail in solution.warnings]
    if stats is not None and stats.borrowed:
        others = f"{stats.borrowed} of {sum(stats.count.values())} tokens were not routed to it and count like its own"
        result.warnings.append((FEW, first, others))
    for name, weight, quantized in zip(group.linears, weights, solution.weights, strict=True):
        result.weights[name] = quantized
        act = method.scheme.activations if method.scheme else None
        errors = _errors(weight, quantized, stats, act, solution.input_scale)
        if group.name == HEAD:
            errors.pop("vision", None)  # no generated token follows a visual one directly
        result.errors[name] = errors
        if solution.input_scale is not None:
            result.input_scales[name] = solution.input_scale
    return result


@contextmanager
def naming_layers(names: Sequence[str], weights: Sequence[Tensor]) -> Iterator[None]:
    """Turn a ValueError about weights or statistics into a UserError that names the layer: the first whose weight is not
    finite, or the first of all."""
    try:
        yield
    except ValueError as error:
        named = zip(names, weights, strict=True)
        name = next((name for name, weight in named if not weight.isfinite().all()), names[0])
        raise UserError(f"{name}: {error}") from error


def _divided(parameter: Tensor, scale: Tensor, offset: float = 0.0) -> Tensor:
    """Divide `parameter [channels, ...]`, to which an op adds `offset`, by `scale [channels]`; keeps the parameter's dtype."""
    scale = scale.to(parameter.device).view(-1, *[1] * (parameter.dim() - 1))
    return ((parameter.float() + offset) / scale - offset).to(parameter.dtype)


def _errors(
    weight: Tensor, quantized: QTensor, stats: GroupStats | None, act: ActFormat | None, input_scale: Tensor | None
) -> dict[str, float]:
    """Relative squared error of a layer's output by modality on held-out tokens, if there are any, or without data of its
    weight, on evenly spaced rows.

    `act`: format to which the layer's inputs are rounded. That error is uncorrelated with the weights', so squares add.
    `input_scale`: its scale if it is static.
    """
    step = math.ceil(len(weight) / _ROWS)
    weight, q = weight[::step].float(), quantized.dequantize(torch.float32, slice(None, None, step))
    if stats is None or "gram" not in stats.measured.needs:
        return {"weight": ((q - weight).square().sum() / weight.square().sum().clamp_min(1e-30)).item()}
    measured = stats.measured
    errors = measured.error(q - weight, weight)
    # where no held-out token is of a modality, or their inputs are not finite
    if "gram" in stats.needs and any(count and name not in errors for name, count in stats.count.items()):
        errors = stats.error(q - weight, weight) | errors
    added = {} if act is None else measured.rounding_error(q, weight, lambda x: round_activations(x, act, input_scale))
    return {modality: error + added.get(modality, 0.0) for modality, error in errors.items()}


def warnings(results: Iterable[BlockResult]) -> list[str]:
    """Summarize the warnings of all blocks, a line for each kind whatever the number of layers concerned."""
    by_text: dict[str, list[tuple[str, str]]] = {}
    for what, layer, detail in (warning for result in results for warning in result.warnings):
        by_text.setdefault(what, []).append((layer, detail))
    return [
        f"{what}; {len(where)} group{'s' if len(where) > 1 else ''} of layers, first {where[0][0]}: {where[0][1]}"
        for what, where in by_text.items()
    ]


@torch.no_grad()
def apply(result: BlockResult, modules: Mapping[str, Any], norm_offset: float = 0.0) -> None:
    """Apply a block's result to the model: divide the smoothed ops, multiply the 16-bit layers that read them, and replace
    quantized weights by their dequantized values.

    Args:
        modules: by memory name, linear layers and the ops before them.
        norm_offset: norms compute `x * (norm_offset + weight)`.
    """
    for name, scale in result.smoothing.items():
        offset = 0.0 if isinstance(modules[name], nn.Linear) else norm_offset
        for local, parameter in modules[name].named_parameters(recurse=False):
            if local == "weight" and isinstance(modules[name], nn.Linear):
                continue  # quantized layers are already smoothed
            parameter.copy_(_divided(parameter, scale, offset if local == "weight" else 0.0))
    for name, scale in result.multiplied.items():
        weight = modules[name].weight
        weight.data = (weight.float() * scale.to(weight.device)).to(weight.dtype)
    for name, quantized in result.weights.items():
        weight = modules[name].weight
        # Not in place: the memory may be mapped from a file.
        weight.data = quantized.dequantize(weight.dtype).to(weight.device)

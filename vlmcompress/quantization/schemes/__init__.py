"""Post-training quantization schemes, one algorithm a file; the file's name is the scheme's name.

A scheme is pure mathematics over weights and calibration statistics: no model, no IO. It works on *groups*, linear
layers that read the same input (q/k/v; gate/up; ...). A module of this folder has

    Options                                   frozen dataclass that extends `QuantizerOptions`: the recipe's `options`, checked
                                              when made (ValueError). The package reads `bits` and `balance` from that base;
                                              a field or property of the same name replaces them. Every field has a default
    needs(options) -> Needs                   statistics and searches that it requires; `Needs()`: no data
    scheme(options) -> Scheme | None          number formats of the result; None: leaves the weights alone
    quantize(weight, stats, options, scale_dtype, prepared) -> QTensor      the rounded weight `[out, in]`

and, where the method has such a step,

    smooth(weights, stats, options, scale_dtype) -> Smoothing     per input channel: the op before is divided by its scale
                                                                  [in] and the weights are multiplied by it
    prepare(weights, stats, options, factorization) -> Any        work shared by a group, passed on as `prepared`; its
                                                                  `warnings`, if it has any, are reported to the user.
                                                                  `factorization`: that of `smooth`, or None
    quantize_group(weights, stats, options, scale_dtype, prepared) -> list[QTensor]     `quantize` of a group's weights at
                                                                  once, where that is faster
    input_scale(stats, options) -> Tensor | None                  static scale [1] of the activations (of NVFP4 their global
                                                                  scale); None: these options round none
    other(group, layer, layers, options) -> (scheme, its options) | None    what a group of the decoder gets instead: `group`
        is its name in the family (`models.LinearGroup`), `layer` its block of `layers`; None: this scheme
    ALIASES = ("int4",)                                           other names that users know it by; recipes and manifests have
                                                                  the file's name
    PRESETS = {"W8A8": {}}                                        presets of compressed-tensors that it is with these options
    sketch(weight, stats, options, scale_dtype, prepared)         a cheap estimate of the error of `quantize` on rows
    PREPARED_BY: tuple[str, ...]                                  options that `prepare` reads besides the statistics

`smooth` and `solve` below call whichever of these a module defines. A scheme whose options have a `balance` (see
`statistics.balance`) gets statistics weighted by it, in every step. To add a scheme, add a file.
"""

# ruff: noqa: F401  # what is imported here is what the package offers

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import QTensor
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions, Search, Smoothing
from vlmcompress.utils.registry import SCHEMES as REGISTRY


@dataclass(frozen=True)
class Solution:
    """A quantized group: a `QTensor` per weight, the static scale `[1]` of their input if the scheme has one, and `warnings`:
    pairs (deviation from what the options ask for, details)."""

    weights: list[QTensor]
    input_scale: Tensor | None = None
    warnings: Sequence[tuple[str, str]] = ()


@torch.no_grad()
def smooth(
    method: Quantizer,
    weights: list[Tensor],
    stats: GroupStats | None,
    options: QuantizerOptions,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Smoothing:
    """Search the method's smoothing scale for the weights `[out_i, in]` of a group, which are not modified."""
    step, balanced = getattr(method, "smooth", None), _balanced(stats, options)
    if step is None:
        return Smoothing()
    smoothing: Smoothing = step(weights, balanced, options, scale_dtype)
    # A factorization of balanced statistics is dropped: `solve` balances them again and factorizes them itself.
    return smoothing if balanced is stats else Smoothing(smoothing.scale)


@torch.no_grad()
def solve(
    method: Quantizer,
    weights: list[Tensor],
    stats: GroupStats | None,
    options: QuantizerOptions,
    scale_dtype: torch.dtype,
    factorization: Any = None,
) -> Solution:
    """Quantize the weights `[out_i, in]` of one group with the statistics of their input.

    After smoothing, pass the scaled weights (preferably float32), `stats.rescaled(s)` and the `factorization` of
    `smooth`, which is consumed. Smoothing and solving are separate steps because one group's scale may divide the rows of
    another group's weights: all groups of a block are smoothed before the first is rounded. Layers that an engine fuses into
    one matrix (q/k/v, gate/up) must be passed together, so that they share the scales that the engine requires to be shared.
    """
    stats = _balanced(stats, options)
    prepare = getattr(method, "prepare", None)
    prepared = None if prepare is None else prepare(weights, stats, options, factorization)
    input_scale, together = getattr(method, "input_scale", None), getattr(method, "quantize_group", None)
    return Solution(
        together(weights, stats, options, scale_dtype, prepared)
        if together
        else [method.quantize(weight, stats, options, scale_dtype, prepared) for weight in weights],
        None if input_scale is None else input_scale(stats, options),
        getattr(prepared, "warnings", ()),
    )


@torch.no_grad()
def sketch(
    method: Quantizer,
    weights: list[Tensor],
    stats: GroupStats | None,
    options: QuantizerOptions,
    scale_dtype: torch.dtype,
    prepared: MutableMapping[Any, Any],
    factorization: Any = None,
) -> list[Tensor]:
    """Estimate the errors `q - w` of `solve`, for a selection of rows `[rows_i, in]` of each weight.

    Args:
        factorization: as in `solve`.
        prepared: cache of the methods' `prepare` results for this group; reuse it only with the same statistics.
    """
    stats = _balanced(stats, options)
    prepare, cheap = getattr(method, "prepare", None), getattr(method, "sketch", None)
    shared = None
    if prepare is not None:
        names = getattr(method, "PREPARED_BY", None)
        key = (method.__name__, *(repr(getattr(options, name)) for name in names)) if names else None
        shared = prepared.get(key) if key else None
        if shared is None:
            shared = prepare(weights, stats, options, factorization)
            if key:
                prepared[key] = shared
    if cheap is not None:
        return [cheap(weight, stats, options, scale_dtype, shared) for weight in weights]
    quantized = [method.quantize(weight, stats, options, scale_dtype, shared) for weight in weights]
    return [q.dequantize(torch.float32).sub_(weight) for q, weight in zip(quantized, weights, strict=True)]


def _balanced(stats: GroupStats | None, options: QuantizerOptions) -> GroupStats | None:
    return None if stats is None else stats.balanced(options.balance or "off")

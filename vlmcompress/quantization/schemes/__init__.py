"""Post-training quantization schemes, one algorithm a file; the file's name is the scheme's name.

A scheme is pure mathematics over weights and calibration statistics: no model, no IO. It works on *groups*, linear
layers that read the same input (q/k/v; gate/up; ...). A module of this folder has

    Options     a frozen dataclass that extends `QuantizerOptions`: the recipe's `options`, checked when made (ValueError). The
                package reads `bits` and `balance` from that base; a field or property of the same name replaces them. Every
                field has a default
    SCHEME      an instance of a subclass of `Quantizer` (`_base.py`), the contract, with default methods: only `scheme` must be
                written

`smooth` and `solve` below run a scheme's steps. A scheme whose options have a `balance` (see `statistics.balance`) gets
statistics weighted by it, in every step. To add a scheme, add a file.
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
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions, Smoothing
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
    method: Quantizer[Any],
    weights: list[Tensor],
    stats: GroupStats | None,
    options: QuantizerOptions,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Smoothing:
    """Search the method's smoothing scale for the weights `[out_i, in]` of a group, which are not modified."""
    balanced = _balanced(stats, options)
    smoothing = method.smooth(weights, balanced, options, scale_dtype)
    # A factorization of balanced statistics is dropped: `solve` balances them again and factorizes them itself.
    return smoothing if balanced is stats else Smoothing(smoothing.scale)


@torch.no_grad()
def solve(
    method: Quantizer[Any],
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
    prepared = method.prepare(weights, stats, options, factorization)
    return Solution(
        method.quantize_group(weights, stats, options, scale_dtype, prepared),
        method.input_scale(stats, options),
        method.warnings(prepared),
    )


@torch.no_grad()
def sketch(
    method: Quantizer[Any],
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
    key = (type(method), *(repr(getattr(options, name)) for name in method.PREPARED_BY)) if method.PREPARED_BY else None
    shared = prepared.get(key) if key else None
    if shared is None:
        shared = method.prepare(weights, stats, options, factorization)
        if key:
            prepared[key] = shared
    return [method.sketch(weight, stats, options, scale_dtype, shared) for weight in weights]


def _balanced(stats: GroupStats | None, options: QuantizerOptions) -> GroupStats | None:
    return None if stats is None else stats.balanced(options.balance or "off")

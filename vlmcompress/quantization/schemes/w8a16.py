"""8-bit integer weights, 16-bit activations, rounded to nearest: half the memory at next to no loss, no data needed.

For GPUs without FP8 units when 4 bits cost too much accuracy. Saves memory and bandwidth, not arithmetic. vLLM 0.32
runs it on CUDA (Marlin: symmetric only, groups of 32, 64, 128 or a row) and refuses it on a CPU, where `int8` is the
alternative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import QTensor, Scheme, round_to_nearest, weight_only
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes._base import Needs, QuantizerOptions

PRESETS: dict[str, dict] = {"W8A16": {"group_size": 128}}


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`group_size`: columns that share a scale; -1 (default): one scale per row."""

    group_size: int = -1

    def __post_init__(self) -> None:
        scheme(self)


def needs(options: Options) -> Needs:
    """No statistics: the scheme is data-free."""
    return Needs()


def scheme(options: Options) -> Scheme:
    """Number formats: symmetric 8-bit integer weights, 16-bit activations."""
    return weight_only(8, options.group_size)


def quantize(
    weight: Tensor, stats: GroupStats | None, options: Options, scale_dtype: torch.dtype, prepared: Any = None
) -> QTensor:
    """Round `weight [out, in]` to nearest."""
    return round_to_nearest(weight, scheme(options).weights, scale_dtype=scale_dtype)

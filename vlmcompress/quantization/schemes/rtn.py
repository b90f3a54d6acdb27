"""Round to nearest (W4A16): every weight goes to the closest code of its group, no data needed.

The baseline that every calibrated method has to beat. Costs one pass over the weights. Loses the most at 4 bits and
below, where a few large input channels make small weight errors matter; at 8 bits it is as good as the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import QTensor, Scheme, round_to_nearest, weight_only
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes._base import Needs, QuantizerOptions


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`bits` per weight, `group_size` columns that share a scale (-1: a whole row), `symmetric`: no zero points."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        scheme(self)


def needs(options: Options) -> Needs:
    """No statistics: the scheme is data-free."""
    return Needs()


def scheme(options: Options) -> Scheme:
    """Number formats: integer weights, 16-bit activations."""
    return weight_only(options.bits, options.group_size, options.symmetric)


def quantize(
    weight: Tensor, stats: GroupStats | None, options: Options, scale_dtype: torch.dtype, prepared: Any = None
) -> QTensor:
    """Round `weight [out, in]` to nearest."""
    return round_to_nearest(weight, scheme(options).weights, scale_dtype=scale_dtype)

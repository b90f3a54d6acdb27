"""8-bit integer weights, 16-bit activations, rounded to nearest: half the memory at next to no loss, no data needed.

For GPUs without FP8 units when 4 bits cost too much accuracy. Saves memory and bandwidth, not arithmetic. vLLM 0.32
runs it on CUDA (Marlin: symmetric only, groups of 32, 64, 128 or a row) and refuses it on a CPU, where `int8` is the
alternative.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress.numerics import Scheme, weight_only
from vlmcompress.quantization.schemes._base import QuantizerOptions, no_data, to_nearest

PRESETS: dict[str, dict] = {"W8A16": {"group_size": 128}}


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`group_size`: columns that share a scale; -1 (default): one scale per row."""

    group_size: int = -1

    def __post_init__(self) -> None:
        scheme(self)


def scheme(options: Options) -> Scheme:
    """Number formats: symmetric 8-bit integer weights, 16-bit activations."""
    return weight_only(8, options.group_size)


needs, quantize = no_data, to_nearest(scheme)

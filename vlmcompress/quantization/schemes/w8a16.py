"""8-bit integer weights, 16-bit activations, rounded to nearest: half the memory at next to no loss, no data needed.

For GPUs without FP8 units when 4 bits cost too much accuracy. Saves memory and bandwidth, not arithmetic. vLLM 0.32
runs it on CUDA (Marlin: symmetric only, groups of 32, 64, 128 or a row) and refuses it on a CPU, where `int8` is the
alternative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from vlmcompress.numerics import Scheme, weight_only
from vlmcompress.quantization.schemes._base import Quantizer, QuantizerOptions


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`group_size`: columns that share a scale; -1 (default): one scale per row."""

    group_size: int = -1

    def __post_init__(self) -> None:
        SCHEME.scheme(self)


class W8A16(Quantizer[Options]):
    """The scheme `w8a16`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"W8A16": {"group_size": 128}}

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: symmetric 8-bit integer weights, 16-bit activations."""
        return weight_only(8, options.group_size)


SCHEME = W8A16()

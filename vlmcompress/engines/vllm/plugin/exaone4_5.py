"""EXAONE 4.5: the tokens after the encoder are reduced; positions, in one dimension, stay."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from vllm.model_executor.models.exaone4_5 import Exaone4_5_ForConditionalGeneration

from vlmcompress.engines.vllm.plugin._positions import DIMS, PlainRope
from vlmcompress.engines.vllm.plugin._processing import Placeholders, register_processing
from vlmcompress.engines.vllm.plugin._qwen import ImagesInfo, QwenProcessor, ReducedQwen
from vlmcompress.reduction.methods import Grid

ARCHITECTURE = "Exaone4_5_ForConditionalGeneration"
SIGNALS = ("features", "pixels")


class Processor(QwenProcessor):
    """Mixin of the processor: text continues after all of an image's tokens."""

    def _placeholders(self, full: Any, count: int, grid: Grid, pace: float) -> Placeholders:
        """Select from the `full` placeholders of an image the `count` that remain; text continues after all of them."""
        return Placeholders(full[:count], positions=len(full))


@register_processing(ImagesInfo, Processor)
class VlmcompressExaone4_5_ForConditionalGeneration(ReducedQwen, PlainRope, Exaone4_5_ForConditionalGeneration):  # type: ignore[misc]
    """vLLM's model of the family, with a reducer after its encoder."""

    def places(self, grid: Grid, pace: float) -> np.ndarray:
        """The index of each token, in three equal columns `[n, 3]`."""
        return np.arange(math.prod(grid))[:, None].repeat(DIMS, 1)

    def extent(self, grid: Grid, pace: float) -> int:
        """Number of tokens of an image."""
        return math.prod(grid)

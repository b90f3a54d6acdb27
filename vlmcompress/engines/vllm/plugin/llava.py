"""LLaVA-1.5: the projected tokens of each image are reduced to an exact count; plain RoPE, original positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._processing import ReducedInfo, ReducedProcessor
from vlmcompress.engines.vllm.plugin._reducing import Reducer
from vlmcompress.reducers import Grid

ARCHITECTURE = "LlavaForConditionalGeneration"
SIGNALS = ("features",)


def grid_of(config: Any) -> Grid:
    """The grid of an image's tokens; all images have the same size."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    return (1, side, side)


class Info(ReducedInfo, LlavaProcessingInfo):
    """Counts of reduced images."""

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """How many tokens stand for an image in the prompt."""
        return self.reducer.count(grid_of(self.get_hf_config()))


class Processor(ReducedProcessor, LlavaMultiModalProcessor):
    """vLLM's, with cache keys of the reducer's own."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=LlavaDummyInputsBuilder)
class VlmcompressLlavaForConditionalGeneration(LlavaForConditionalGeneration, SupportsMRoPE):
    """vLLM's LLaVA with a reducer behind its projector."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.reducer = Reducer.of(self.config)
        self.grid = grid_of(self.config)

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        images = super()._process_image_input(image_input)
        return tuple(self.reducer.reduce(self.grid, features).apply(features) for features in images)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Three equal rows `[3, tokens]` of the positions that the tokens have in the full prompt, and what to add behind."""
        positions = torch.arange(len(input_tokens))
        return positions.expand(3, -1), 0

    def forward(self, input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with one of the three equal rows of positions."""
        return super().forward(input_ids, positions[0] if positions.ndim == 2 else positions, *args, **kwargs)

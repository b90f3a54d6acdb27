"""LLaVA-1.5: one grid for every image, all of one size."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._llava import LlavaInfo, LlavaProcessor, LlavaShaped

ARCHITECTURE = "LlavaForConditionalGeneration"
SIGNALS = ("features",)


class Info(LlavaInfo, LlavaProcessingInfo):
    """vLLM's, with the counts of reduced images."""


class Processor(LlavaProcessor, LlavaMultiModalProcessor):
    """vLLM's, with cache keys of the reducer's own."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=LlavaDummyInputsBuilder)
class VlmcompressLlavaForConditionalGeneration(LlavaShaped, LlavaForConditionalGeneration):
    """vLLM's, with a reducer behind the projector."""

    def _size(self, item: Any) -> tuple[int, int]:
        height, width = item["pixel_values"].data.shape[-2:]
        return height, width

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        pixels = image_input["pixel_values"]
        return self._reduced(super()._process_image_input(image_input), [image.shape[-2:] for image in pixels])

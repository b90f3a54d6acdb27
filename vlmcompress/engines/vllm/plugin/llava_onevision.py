"""LLaVA-OneVision: the whole image and the tiles put together are a grid each; newlines between rows stay. Images only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionDummyInputsBuilder,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionMultiModalProcessor,
    LlavaOnevisionProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._llava import LlavaInfo, LlavaProcessor, LlavaShaped

ARCHITECTURE = "LlavaOnevisionForConditionalGeneration"
SIGNALS = ("features", "query", "ahead")


class Info(LlavaInfo, LlavaOnevisionProcessingInfo):
    """vLLM's, with the counts of reduced images."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Videos have no place here: their tokens are not reduced yet."""
        return {"image": None}


class Processor(LlavaProcessor, LlavaOnevisionMultiModalProcessor):
    """vLLM's, with cache keys of the reducer's own."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=LlavaOnevisionDummyInputsBuilder)
class VlmcompressLlavaOnevisionForConditionalGeneration(LlavaShaped, LlavaOnevisionForConditionalGeneration):
    """vLLM's, with a reducer behind the projector."""

    def _process_image_input(self, image_input: Any) -> Any:
        return self._reduced(super()._process_image_input(image_input), image_input["image_sizes"].tolist())

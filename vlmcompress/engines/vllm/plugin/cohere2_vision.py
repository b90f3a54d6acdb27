"""Cohere2-Vision (Command A Vision): tiles with a line break after each, then the whole image as one more."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.cohere2_vision import (
    Cohere2VisionDummyInputsBuilder,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionMultiModalProcessor,
    Cohere2VisionProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor

ARCHITECTURE = "Cohere2VisionForConditionalGeneration"
SIGNALS = ("features",)


class Info(TiledInfo, Cohere2VisionProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images."""


class Processor(TiledProcessor, Cohere2VisionMultiModalProcessor):
    """vLLM's processor of the family, with cache keys that depend on the reducer."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=Cohere2VisionDummyInputsBuilder)
class VlmcompressCohere2VisionForConditionalGeneration(TiledImages, Cohere2VisionForConditionalGeneration):
    """vLLM's model of the family, with a reducer after the projector."""

    def _process_image_input(self, image_input: Any, **fields: Any) -> Any:
        return super()._process_image_input(image_input)

"""Cohere2-Vision (Command A Vision): tiles with a line break after each, then the whole image as one more."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.cohere2_vision import Cohere2VisionForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor

ARCHITECTURE = "Cohere2VisionForConditionalGeneration"
SIGNALS = ("features", "pixels")


@register_processing(TiledInfo, TiledProcessor)
class VlmcompressCohere2VisionForConditionalGeneration(TiledImages, Cohere2VisionForConditionalGeneration):
    """vLLM's model of the family, with a reducer after the projector."""

    def _process_image_input(self, image_input: Any, **fields: Any) -> Any:
        return super()._process_image_input(image_input)

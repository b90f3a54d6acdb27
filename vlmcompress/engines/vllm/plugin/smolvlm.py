"""SmolVLM: Idefics3 with another processor."""

from __future__ import annotations

from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor

ARCHITECTURE = "SmolVLMForConditionalGeneration"
SIGNALS = ("features", "pixels", "keys", "heads")
COUNTED = True


@register_processing(TiledInfo, TiledProcessor)
class VlmcompressSmolVLMForConditionalGeneration(TiledImages, SmolVLMForConditionalGeneration):
    """vLLM's model of the family, with a reducer in its encoder or after the projector."""

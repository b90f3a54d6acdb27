"""SmolVLM: Idefics3 with another processor."""

from __future__ import annotations

from vllm.model_executor.models.idefics3 import Idefics3DummyInputsBuilder, Idefics3MultiModalProcessor
from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration, SmolVLMProcessingInfo
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor

ARCHITECTURE = "SmolVLMForConditionalGeneration"
SIGNALS = ("features", "keys", "heads")
COUNTED = True


class Info(TiledInfo, SmolVLMProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images."""


class Processor(TiledProcessor, Idefics3MultiModalProcessor):
    """vLLM's processor of the family, with cache keys that depend on the reducer."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=Idefics3DummyInputsBuilder)
class VlmcompressSmolVLMForConditionalGeneration(TiledImages, SmolVLMForConditionalGeneration):
    """vLLM's model of the family, with a reducer in its encoder or after the projector."""

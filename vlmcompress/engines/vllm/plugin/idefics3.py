"""Idefics3: tiles with text between them, then the whole image as one more."""

from __future__ import annotations

from vllm.model_executor.models.idefics3 import (
    Idefics3DummyInputsBuilder,
    Idefics3ForConditionalGeneration,
    Idefics3MultiModalProcessor,
    Idefics3ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor

ARCHITECTURE = "Idefics3ForConditionalGeneration"
SIGNALS = ("features", "keys", "heads")
COUNTED = True


class Info(TiledInfo, Idefics3ProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images."""


class Processor(TiledProcessor, Idefics3MultiModalProcessor):
    """vLLM's processor of the family, with cache keys that depend on the reducer."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=Idefics3DummyInputsBuilder)
class VlmcompressIdefics3ForConditionalGeneration(TiledImages, Idefics3ForConditionalGeneration):
    """vLLM's model of the family, with a reducer in its encoder or after the projector."""

"""Idefics3: tiles with text between them, then the whole image as one more."""

from __future__ import annotations

from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor

ARCHITECTURE = "Idefics3ForConditionalGeneration"
SIGNALS = ("features", "pixels", "keys", "heads")
COUNTED = True


@register_processing(TiledInfo, TiledProcessor)
class VlmcompressIdefics3ForConditionalGeneration(TiledImages, Idefics3ForConditionalGeneration):
    """vLLM's model of the family, with a reducer in its encoder or after the projector."""

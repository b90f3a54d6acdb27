"""Qwen3-VL: deepstack features follow their tokens, timestamps stay between the remaining tokens of a video's frames."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._qwen3 import Qwen3Info, Qwen3Processor, ReducedQwen3

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
SIGNALS = ("features", "query", "views")
VIDEOS = True


class Info(Qwen3Info, Qwen3VLProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images and videos."""


@MULTIMODAL_REGISTRY.register_processor(Qwen3Processor, info=Info, dummy_inputs=Qwen3VLDummyInputsBuilder)
class VlmcompressQwen3VLForConditionalGeneration(ReducedQwen3, Qwen3VLForConditionalGeneration):
    """vLLM's Qwen3-VL with a reducer after its encoder, which reads the last layer's features, not deepstack's."""

"""Qwen3-VL with a mixture of experts: like the dense model."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_vl import Qwen3VLDummyInputsBuilder
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeProcessingInfo
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._qwen3 import Qwen3Info, Qwen3Processor, ReducedQwen3

ARCHITECTURE = "Qwen3VLMoeForConditionalGeneration"
SIGNALS = ("features", "query", "views")
VIDEOS = True


class Info(Qwen3Info, Qwen3VLMoeProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images and videos."""


@MULTIMODAL_REGISTRY.register_processor(Qwen3Processor, info=Info, dummy_inputs=Qwen3VLDummyInputsBuilder)
class VlmcompressQwen3VLMoeForConditionalGeneration(ReducedQwen3, Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Qwen3-VL-MoE with a reducer after its encoder, which reads the last layer's features, not deepstack's."""

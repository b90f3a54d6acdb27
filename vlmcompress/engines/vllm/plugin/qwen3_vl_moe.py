"""Qwen3-VL with a mixture of experts: like the dense model."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen3 import Qwen3Info, Qwen3Processor, ReducedQwen3

ARCHITECTURE = "Qwen3VLMoeForConditionalGeneration"
SIGNALS = ("features", "pixels")
VIDEOS = True


@register_processing(Qwen3Info, Qwen3Processor)
class VlmcompressQwen3VLMoeForConditionalGeneration(ReducedQwen3, Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Qwen3-VL-MoE with a reducer after its encoder, which reads the last layer's features, not deepstack's."""

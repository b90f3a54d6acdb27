"""Qwen3.5 with a mixture of experts: like the dense model; see `qwen3_5.py` for its Gated DeltaNets."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_5 import Qwen3_5MoeForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen3 import Qwen3Info, Qwen3Processor, ReducedQwen3

ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
SIGNALS = ("features", "pixels")
VIDEOS = True


@register_processing(Qwen3Info, Qwen3Processor)
class VlmcompressQwen3_5MoeForConditionalGeneration(ReducedQwen3, Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Qwen3.5-MoE with a reducer after its encoder."""

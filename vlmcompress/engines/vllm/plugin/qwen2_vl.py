"""Qwen2-VL: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen import QwenInfo, QwenProcessor, ReducedQwen

ARCHITECTURE = "Qwen2VLForConditionalGeneration"
SIGNALS = ("features", "pixels")
VIDEOS = True


@register_processing(QwenInfo, QwenProcessor)
class VlmcompressQwen2VLForConditionalGeneration(ReducedQwen, Qwen2VLForConditionalGeneration):
    """vLLM's Qwen2-VL with a reducer after its encoder."""

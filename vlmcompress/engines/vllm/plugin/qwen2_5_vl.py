"""Qwen2.5-VL: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen import QwenInfo, QwenProcessor, ReducedQwen

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
SIGNALS = ("features", "pixels")
VIDEOS = True


@register_processing(QwenInfo, QwenProcessor)
class VlmcompressQwen2_5_VLForConditionalGeneration(ReducedQwen, Qwen2_5_VLForConditionalGeneration):
    """vLLM's Qwen2.5-VL with a reducer after its encoder."""

"""Qwen3-VL: deepstack features follow their tokens, timestamps stay between the remaining tokens of a video's frames."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen3 import Qwen3Info, Qwen3Processor, ReducedQwen3

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
SIGNALS = ("features", "pixels")
VIDEOS = True


@register_processing(Qwen3Info, Qwen3Processor)
class VlmcompressQwen3VLForConditionalGeneration(ReducedQwen3, Qwen3VLForConditionalGeneration):
    """vLLM's Qwen3-VL with a reducer after its encoder, which reads the last layer's features, not deepstack's."""

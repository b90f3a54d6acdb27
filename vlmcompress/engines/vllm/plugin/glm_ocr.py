"""GLM-OCR: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.glm_ocr import GlmOcrForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen import ImagesInfo, QwenProcessor, ReducedQwen

ARCHITECTURE = "GlmOcrForConditionalGeneration"
SIGNALS = ("features", "pixels")


@register_processing(ImagesInfo, QwenProcessor)
class VlmcompressGlmOcrForConditionalGeneration(ReducedQwen, GlmOcrForConditionalGeneration):
    """vLLM's model of the family, with a reducer after its encoder."""

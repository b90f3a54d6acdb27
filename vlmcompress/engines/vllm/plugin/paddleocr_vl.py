"""PaddleOCR-VL: the tokens after the projector are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.paddleocr_vl import PaddleOCRVLForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen import ImagesInfo, QwenProcessor, ReducedQwen

ARCHITECTURE = "PaddleOCRVLForConditionalGeneration"
SIGNALS = ("features", "pixels")


@register_processing(ImagesInfo, QwenProcessor)
class VlmcompressPaddleOCRVLForConditionalGeneration(ReducedQwen, PaddleOCRVLForConditionalGeneration):
    """vLLM's model of the family, with a reducer after its projector."""

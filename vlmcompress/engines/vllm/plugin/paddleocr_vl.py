"""PaddleOCR-VL: the tokens after the projector are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.paddleocr_vl import (
    PaddleOCRVLDummyInputsBuilder,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLMultiModalProcessor,
    PaddleOCRVLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._qwen import ImagesInfo, QwenProcessor, ReducedQwen

ARCHITECTURE = "PaddleOCRVLForConditionalGeneration"
SIGNALS = ("features", "query")


class Info(ImagesInfo, PaddleOCRVLProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images."""


class Processor(QwenProcessor, PaddleOCRVLMultiModalProcessor):
    """vLLM's processor of the family, with a placeholder for each kept token."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=PaddleOCRVLDummyInputsBuilder)
class VlmcompressPaddleOCRVLForConditionalGeneration(ReducedQwen, PaddleOCRVLForConditionalGeneration):
    """vLLM's model of the family, with a reducer after its projector."""

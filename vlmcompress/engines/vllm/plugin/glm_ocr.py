"""GLM-OCR: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.glm4_1v import Glm4vDummyInputsBuilder
from vllm.model_executor.models.glm_ocr import GlmOcrForConditionalGeneration
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._glm import GlmInfo, GlmProcessor
from vlmcompress.engines.vllm.plugin._qwen import ReducedQwen

ARCHITECTURE = "GlmOcrForConditionalGeneration"
SIGNALS = ("features", "query")


@MULTIMODAL_REGISTRY.register_processor(GlmProcessor, info=GlmInfo, dummy_inputs=Glm4vDummyInputsBuilder)
class VlmcompressGlmOcrForConditionalGeneration(ReducedQwen, GlmOcrForConditionalGeneration):
    """vLLM's model of the family, with a reducer after its encoder."""

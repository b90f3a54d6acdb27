"""GLM-4.1V and GLM-4.6V-Flash: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.glm4_1v import Glm4vForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen import ImagesInfo, QwenProcessor, ReducedQwen

ARCHITECTURE = "Glm4vForConditionalGeneration"
SIGNALS = ("features", "pixels")


@register_processing(ImagesInfo, QwenProcessor)
class VlmcompressGlm4vForConditionalGeneration(ReducedQwen, Glm4vForConditionalGeneration):
    """vLLM's model of the family, with a reducer after its encoder."""

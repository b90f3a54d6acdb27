"""GLM-4.5V and GLM-4.6V: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.glm4_1v import Glm4vMoeForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen import ImagesInfo, QwenProcessor, ReducedQwen

ARCHITECTURE = "Glm4vMoeForConditionalGeneration"
SIGNALS = ("features", "pixels")


@register_processing(ImagesInfo, QwenProcessor)
class VlmcompressGlm4vMoeForConditionalGeneration(ReducedQwen, Glm4vMoeForConditionalGeneration):
    """vLLM's model of the family, with a reducer after its encoder."""

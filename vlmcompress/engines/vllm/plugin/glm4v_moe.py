"""GLM-4.5V and GLM-4.6V: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.glm4_1v import Glm4vDummyInputsBuilder, Glm4vMoeForConditionalGeneration
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._glm import GlmInfo, GlmProcessor
from vlmcompress.engines.vllm.plugin._qwen import ReducedQwen

ARCHITECTURE = "Glm4vMoeForConditionalGeneration"
SIGNALS = ("features", "query")


@MULTIMODAL_REGISTRY.register_processor(GlmProcessor, info=GlmInfo, dummy_inputs=Glm4vDummyInputsBuilder)
class VlmcompressGlm4vMoeForConditionalGeneration(ReducedQwen, Glm4vMoeForConditionalGeneration):
    """vLLM's model of the family, with a reducer after its encoder."""

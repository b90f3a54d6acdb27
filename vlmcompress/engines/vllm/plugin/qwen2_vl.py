"""Qwen2-VL: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
    Qwen2VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._qwen import QwenInfo, QwenProcessor, ReducedQwen
from vlmcompress.engines.vllm.plugin._views import ViewsProcessor

ARCHITECTURE = "Qwen2VLForConditionalGeneration"
SIGNALS = ("features", "query", "views")
VIDEOS = True


class Info(QwenInfo, Qwen2VLProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images."""


class Processor(ViewsProcessor, QwenProcessor, Qwen2VLMultiModalProcessor):
    """vLLM's processor of the family, with a placeholder for each kept token."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=Qwen2VLDummyInputsBuilder)
class VlmcompressQwen2VLForConditionalGeneration(ReducedQwen, Qwen2VLForConditionalGeneration):
    """vLLM's Qwen2-VL with a reducer after its encoder."""

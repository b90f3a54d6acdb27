"""Qwen2.5-VL: the tokens after the encoder are reduced; M-RoPE positions stay."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._qwen import QwenInfo, QwenProcessor, ReducedQwen
from vlmcompress.engines.vllm.plugin._views import ViewsProcessor

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
SIGNALS = ("features", "query", "views")
VIDEOS = True


class Info(QwenInfo, Qwen2_5_VLProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images."""


class Processor(ViewsProcessor, QwenProcessor, Qwen2_5_VLMultiModalProcessor):
    """vLLM's processor of the family, with a placeholder for each kept token."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=Qwen2_5_VLDummyInputsBuilder)
class VlmcompressQwen2_5_VLForConditionalGeneration(ReducedQwen, Qwen2_5_VLForConditionalGeneration):
    """vLLM's Qwen2.5-VL with a reducer after its encoder."""

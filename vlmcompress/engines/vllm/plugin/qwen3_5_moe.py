"""Qwen3.5 with a mixture of experts: like the dense model; see `qwen3_5.py` for its Gated DeltaNets."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_5 import Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeProcessingInfo
from vllm.model_executor.models.qwen3_vl import Qwen3VLDummyInputsBuilder
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._qwen3 import Qwen3Info, Qwen3Processor, ReducedQwen3

ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
SIGNALS = ("features", "query", "views")
VIDEOS = True


class Info(Qwen3Info, Qwen3_5MoeProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images and videos."""


@MULTIMODAL_REGISTRY.register_processor(Qwen3Processor, info=Info, dummy_inputs=Qwen3VLDummyInputsBuilder)
class VlmcompressQwen3_5MoeForConditionalGeneration(ReducedQwen3, Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Qwen3.5-MoE with a reducer after its encoder."""

"""Qwen3.5: Qwen3-VL's encoder without deepstack, in front of Gated DeltaNets and attention.

The recurrent state of a Gated DeltaNet reads only the kept tokens, one after the other; attention sees them at their unreduced
positions.
"""

from __future__ import annotations

from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration

from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.engines.vllm.plugin._qwen3 import Qwen3Info, Qwen3Processor, ReducedQwen3

ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
SIGNALS = ("features", "pixels")
VIDEOS = True


@register_processing(Qwen3Info, Qwen3Processor)
class VlmcompressQwen3_5ForConditionalGeneration(ReducedQwen3, Qwen3_5ForConditionalGeneration):
    """vLLM's Qwen3.5 with a reducer after its encoder."""

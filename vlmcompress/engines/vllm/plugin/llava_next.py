"""LLaVA-NeXT (1.6): the whole image and the joined tiles are one grid each; newlines between rows stay."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.llava import LlavaDummyInputsBuilder
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextMultiModalProcessor,
    LlavaNextProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._llava import LlavaInfo, LlavaProcessor, LlavaShaped

ARCHITECTURE = "LlavaNextForConditionalGeneration"
SIGNALS = ("features", "query")


class Info(LlavaInfo, LlavaNextProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images."""


class Processor(LlavaProcessor, LlavaNextMultiModalProcessor):
    """vLLM's processor of the family, with cache keys that depend on the reducer."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=LlavaDummyInputsBuilder)
class VlmcompressLlavaNextForConditionalGeneration(LlavaShaped, LlavaNextForConditionalGeneration):
    """vLLM's model of the family, with a reducer after the projector."""

    def _process_image_input(self, image_input: Any) -> Any:
        return self._reduced(super()._process_image_input(image_input), image_input["image_sizes"].tolist())

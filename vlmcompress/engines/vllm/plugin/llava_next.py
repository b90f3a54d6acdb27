"""LLaVA-NeXT (1.6): the whole image and the joined tiles are one grid each; newlines between rows stay."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration

from vlmcompress.engines.vllm.plugin._llava import LlavaInfo, LlavaProcessor, LlavaShaped
from vlmcompress.engines.vllm.plugin._processing import register_processing

ARCHITECTURE = "LlavaNextForConditionalGeneration"
SIGNALS = ("features",)


@register_processing(LlavaInfo, LlavaProcessor)
class VlmcompressLlavaNextForConditionalGeneration(LlavaShaped, LlavaNextForConditionalGeneration):
    """vLLM's model of the family, with a reducer after the projector."""

    def _process_image_input(self, image_input: Any) -> Any:
        return self._reduced(super()._process_image_input(image_input), image_input["image_sizes"].tolist())

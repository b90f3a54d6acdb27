"""Idefics3: tiles with text between them, then the whole image as one more."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.idefics3 import (
    Idefics3DummyInputsBuilder,
    Idefics3ForConditionalGeneration,
    Idefics3MultiModalProcessor,
    Idefics3ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor

ARCHITECTURE = "Idefics3ForConditionalGeneration"
SIGNALS = ("features",)


class Counts(TiledInfo):
    """The prompt's text for an image, with as many tokens of each tile as are kept."""

    def get_image_repl(self, *, processor: Any, **arguments: Any) -> str:
        """vLLM's, with the runs of image tokens cut."""
        full, kept = self.tile()
        token, _, _ = self._get_image_token(processor)  # type: ignore[attr-defined]
        text: str = super().get_image_repl(processor=processor, **arguments)  # type: ignore[misc]
        return text.replace(token * full, token * kept)

    def get_num_image_tokens(self, **arguments: Any) -> int:
        """How many of the prompt's tokens stand for an image."""
        full, kept = self.tile()
        return super().get_num_image_tokens(**arguments) // full * kept  # type: ignore[misc]


class Info(Counts, Idefics3ProcessingInfo):
    """vLLM's, with the counts of reduced images."""


class Processor(TiledProcessor, Idefics3MultiModalProcessor):
    """vLLM's, with cache keys of the reducer's own."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=Idefics3DummyInputsBuilder)
class VlmcompressIdefics3ForConditionalGeneration(TiledImages, Idefics3ForConditionalGeneration):
    """vLLM's, with a reducer behind the projector."""

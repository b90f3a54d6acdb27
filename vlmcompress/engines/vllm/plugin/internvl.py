"""InternVL (transformers' form of it): tiles one behind the other, then the whole image as one more. Images only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from vllm.model_executor.models.interns1 import (
    InternS1DummyInputsBuilder,
    InternS1ForConditionalGeneration,
    InternS1MultiModalProcessor,
    InternS1ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import PromptUpdateDetails

from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor

ARCHITECTURE = "InternVLForConditionalGeneration"
SIGNALS = ("features",)


class Info(TiledInfo, InternS1ProcessingInfo):
    """vLLM's, with the counts of reduced images."""

    def get_num_image_tokens(self, **arguments: Any) -> int:
        """How many of the prompt's tokens stand for an image."""
        full, kept = self.tile()
        return super().get_num_image_tokens(**arguments) // full * kept

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Videos have no place here: their tokens are not reduced yet."""
        return {"image": None}


class Processor(TiledProcessor, InternS1MultiModalProcessor):
    """vLLM's, with cache keys of the reducer's own and as many tokens of each tile as are kept."""

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        image: Any = next(update for update in updates if update.modality == "image")
        (token,) = image.target
        full, kept = self.info.tile()

        def replacement(number: int) -> PromptUpdateDetails:
            ids = image.replacement(number).full
            first, run = ids.index(token), ids.count(token)
            ids = [*ids[:first], *[token] * (run // full * kept), *ids[first + run :]]
            return PromptUpdateDetails.select_token_id(ids, token)

        return [dataclasses.replace(image, replacement=replacement)]


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=InternS1DummyInputsBuilder)
class VlmcompressInternVLForConditionalGeneration(TiledImages, InternS1ForConditionalGeneration):
    """vLLM's, with a reducer behind the projector."""

    def _process_vision_input(self, image_input: Any) -> tuple[Tensor, ...]:
        return tuple(self._reduced(rows) for rows in super()._process_vision_input(image_input))

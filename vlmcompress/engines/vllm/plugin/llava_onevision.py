"""LLaVA-OneVision: the whole image and the tiles put together are a grid each; newlines between rows stay. Images only."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionDummyInputsBuilder,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionMultiModalProcessor,
    LlavaOnevisionProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import ImageSize

from vlmcompress.engines.vllm.plugin._llava import LlavaInfo, LlavaProcessor, LlavaShaped

ARCHITECTURE = "LlavaOnevisionForConditionalGeneration"
SIGNALS = ("features", "query", "ahead")


class Info(LlavaInfo, LlavaOnevisionProcessingInfo):
    """vLLM's, with the counts of reduced images."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Videos have no place here: their tokens are not reduced yet."""
        return {"image": None}

    @functools.cached_property
    def _largest(self) -> ImageSize:
        processor: Any = self.get_hf_processor()
        images_of = processor.image_processor
        patch = images_of.size["height"] / math.isqrt(processor.num_image_tokens)
        canvases = images_of.image_grid_pinpoints
        sizes = [size for height, width in canvases for size in fitting(height, width, patch)]
        return max(sizes, key=lambda size: self.get_num_image_tokens(image_width=size.width, image_height=size.height))

    def get_image_size_with_most_features(self) -> ImageSize:
        """vLLM's own is one size for all checkpoints, which others, or newlines that are all kept, exceed."""
        return self._largest


def fitting(height: int, width: int, patch: float) -> Iterator[ImageSize]:
    """Sizes of images that fill a canvas one way and any number of its patches the other way."""
    for row in range(1, round(height / patch) + 1):
        yield ImageSize(width, math.ceil(row * patch))
    for column in range(1, round(width / patch) + 1):
        yield ImageSize(math.ceil(column * patch), height)


class Processor(LlavaProcessor, LlavaOnevisionMultiModalProcessor):
    """vLLM's, with cache keys of the reducer's own."""


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=LlavaOnevisionDummyInputsBuilder)
class VlmcompressLlavaOnevisionForConditionalGeneration(LlavaShaped, LlavaOnevisionForConditionalGeneration):
    """vLLM's, with a reducer behind the projector."""

    def _process_image_input(self, image_input: Any) -> Any:
        return self._reduced(super()._process_image_input(image_input), image_input["image_sizes"].tolist())

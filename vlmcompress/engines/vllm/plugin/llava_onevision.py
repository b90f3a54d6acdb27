"""LLaVA-OneVision: the whole image and the joined tiles are one grid each, and a video is one; newlines stay."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessingInfo,
)
from vllm.multimodal.parse import ImageSize

from vlmcompress.engines.vllm.plugin._llava import LlavaInfo, LlavaProcessor, LlavaShaped
from vlmcompress.engines.vllm.plugin._positions import DIMS, longest_prompt
from vlmcompress.engines.vllm.plugin._processing import register_processing
from vlmcompress.reduction.methods import Grid

ARCHITECTURE = "LlavaOnevisionForConditionalGeneration"
SIGNALS = ("features",)
VIDEOS = True
FRAMES = 16  # most frames of a video in the memory profile, as in vLLM


def film(config: Any, frames: int) -> Grid:
    """The grid of a video's tokens, which are pooled 2 x 2; one newline follows it."""
    side = math.ceil(config.vision_config.image_size // config.vision_config.patch_size / 2)
    return frames, side, side


class Info(LlavaInfo, LlavaOnevisionProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images and videos."""

    def get_num_video_tokens(self, *, image_width: int, image_height: int, num_frames: int) -> int:
        """The most placeholders of such a video in the prompt."""
        return self.reducer.largest.count(film(self.get_hf_config(), num_frames)) + 1

    def get_num_frames_with_most_features(self, seq_len: int, mm_counts: Mapping[str, int]) -> int:
        """The most frames: kept tokens must fit the prompt, and all tokens with the largest images the model's positions.

        At most as many as in vLLM's memory profile.
        """
        size, videos = self.get_image_size_with_most_features(), max(mm_counts.get("video", 0), 1)
        images = mm_counts.get("image", 0) * self.layout(size.width, size.height).tokens
        most = (
            longest_prompt(self.ctx.model_config) - images - 1
        ) // videos  # the prompt may have a beginning-of-text token
        frames = 1
        while frames < FRAMES:
            grid = film(self.get_hf_config(), frames + 1)
            if math.prod(grid) + 1 > most or (self.reducer.largest.count(grid) + 1) * videos > seq_len:
                break
            frames += 1
        return frames

    def lengths(self, modality: str, items: Any, number: int, item: Any) -> tuple[int, int]:
        """Number of tokens of item `number` of `items`, before it is reduced and after; `item`: its processed form."""
        if modality == "image":
            return super().lengths(modality, items, number, item)
        grid = film(self.get_hf_config(), items.get_num_frames(number))
        return math.prod(grid) + 1, self.reducer.of_item(item, modality, math.prod(grid)).count(grid) + 1

    @functools.cached_property
    def _largest(self) -> ImageSize:
        processor: Any = self.get_hf_processor()
        images_of = processor.image_processor
        patch = images_of.size["height"] / math.isqrt(processor.num_image_tokens)
        canvases = images_of.image_grid_pinpoints
        sizes = [size for height, width in canvases for size in fitting(height, width, patch)]
        return max(sizes, key=lambda size: self.get_num_image_tokens(image_width=size.width, image_height=size.height))

    # vllm/model_executor/models/llava_onevision.py::LlavaOnevisionProcessingInfo.get_image_size_with_most_features returns one
    # size for all checkpoints. Can go when it uses their tile grids.
    def get_image_size_with_most_features(self) -> ImageSize:
        """The size of the image with the most tokens; vLLM's fixed size can be exceeded by others, or by newlines."""
        return self._largest


def fitting(height: int, width: int, patch: float) -> Iterator[ImageSize]:
    """Sizes of images that fill a tile grid in one direction and any number of its patches in the other."""
    for row in range(1, round(height / patch) + 1):
        yield ImageSize(width, math.ceil(row * patch))
    for column in range(1, round(width / patch) + 1):
        yield ImageSize(math.ceil(column * patch), height)


@register_processing(Info, LlavaProcessor)
class VlmcompressLlavaOnevisionForConditionalGeneration(LlavaShaped, LlavaOnevisionForConditionalGeneration):
    """vLLM's model of the family, with a reducer after the projector and the pooling."""

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """Positions of an image or video: places are added with its rows; text continues at its unreduced position."""
        if feature.modality == "image":
            return super().span(feature)
        grid = film(self.config, len(feature.data["pixel_values_videos"].data))
        return np.zeros((DIMS, feature.mm_position.length), np.int64), math.prod(grid) + 1

    def _process_image_input(self, image_input: Any) -> Any:
        return self._reduced(super()._process_image_input(image_input), image_input["image_sizes"].tolist())

    # vllm/model_executor/models/llava_onevision.py::LlavaOnevisionForConditionalGeneration._process_video_pixels pools frames
    # and appends the newline, which is after a video's grid and stays.
    def _process_video_pixels(self, inputs: Any) -> tuple[Tensor, ...]:
        reduced = []
        videos = zip(inputs["pixel_values_videos"], super()._process_video_pixels(inputs), strict=True)
        for number, (pixels, rows) in enumerate(videos):
            grid = film(self.config, len(pixels))
            reducer = self.reducer_of("video", number, math.prod(grid))
            result = self._reductions([(rows, [(grid, range(math.prod(grid)))], {}, reducer)])[0]
            reduced.append(self._placed(result.apply(rows), result))
        return tuple(reduced)

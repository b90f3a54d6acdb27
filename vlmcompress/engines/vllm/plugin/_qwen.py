"""Shared code of the Qwen-VL families, and of others with such grids: an image's places, placeholders, and reduction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmcompress.engines.vllm.plugin._loading import sent
from vlmcompress.engines.vllm.plugin._positions import DIMS, OriginalPositions, make_room, pack
from vlmcompress.engines.vllm.plugin._processing import Placeholders, ReducedInfo, ReducedProcessor, without_ours
from vlmcompress.reduction.methods import Grid


def grid_of(patches: Iterable[int], config: Any) -> Grid:
    """The grid of an image's or a video's tokens, from the grid of its patches."""
    t, h, w = (int(side) for side in patches)
    side = config.vision_config.spatial_merge_size
    return t, h // side, w // side


def pace_of(item: Any, modality: str, config: Any) -> float:
    """Number of positions from one frame to the next in a processed image or video."""
    if modality == "image":
        return 1.0
    seconds = item.get("second_per_grid_ts")
    return (1.0 if seconds is None else seconds.data.item()) * _rate(config)


def _rate(config: Any) -> float:
    """Number of positions in a second of video; 1 per pair of frames in families that do not count seconds."""
    return getattr(config.vision_config, "tokens_per_second", 1.0)


def places(grid: Grid, pace: float) -> np.ndarray:
    """M-RoPE positions `[n, 3]` int64 of tokens, counted from the first; frames are `pace` apart, rounded down."""
    indices = np.indices(grid)
    # transformers' `get_rope_index` casts t * tokens_per_second * seconds to whole numbers, so it rounds down.
    indices[0] = (indices[0] * pace).astype(np.int64)
    return indices.reshape(DIMS, -1).T


def extent(grid: Grid, pace: float) -> int:
    """Position of the text after an image or a video, counted from the first of its tokens."""
    return max(int((grid[0] - 1) * pace), grid[1] - 1, grid[2] - 1) + 1


class QwenInfo(ReducedInfo):
    """Mixin of a processing info with the counts of reduced images and videos."""

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        """Return vLLM's limits, without videos for methods that read pixels."""
        limits = super().get_supported_mm_limits()  # type: ignore[misc]
        return {**limits, "video": 0} if self.reducer.pixels else limits

    def _merge_and_resolve_mm_processor_kwargs(self, mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return super()._merge_and_resolve_mm_processor_kwargs(without_ours(mm_kwargs))  # type: ignore[misc]

    # vllm/model_executor/models/qwen2_vl.py::Qwen2VLProcessingInfo._get_vision_info is used for every token count, including
    # that of the largest image in the memory profile.
    def _get_vision_info(self, **arguments: Any) -> tuple[Any, int]:
        size, tokens = super()._get_vision_info(**arguments)  # type: ignore[misc]
        vision = self.get_hf_config().vision_config  # type: ignore[attr-defined]
        side = vision.patch_size * vision.spatial_merge_size
        rows, columns = size.height // side, size.width // side
        return size, self.reducer.largest.count((tokens // (rows * columns), rows, columns))


class ImagesInfo(QwenInfo):
    """Mixin of a processing info of a family that is served with images alone."""

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        """Return that any number of images is accepted, and no video."""
        return {"image": None}

    # vllm/multimodal/encoder_budget.py::get_mm_max_toks_per_item encodes a blank image to reserve memory if this returns None,
    # as vllm/model_executor/models/paddleocr_vl.py::PaddleOCRVLProcessingInfo does.
    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int] | None:
        """Return vLLM's numbers, or all of the largest image if they depend on pixels: blank images may keep few."""
        most: Mapping[str, int] | None = super().get_mm_max_tokens_per_item(seq_len, mm_counts)  # type: ignore[misc]
        if most is not None or not self.reducer.pixels:
            return most
        info: Any = self
        size, vision = info.get_image_size_with_most_features(), info.get_hf_config().vision_config
        side = vision.patch_size * vision.spatial_merge_size
        return {"image": self.reducer.count((1, size.height // side, size.width // side))}


class QwenProcessor(ReducedProcessor):
    """Mixin of a processor: a placeholder for each kept token."""

    def _shortened(self, update: Any, number: int, mm_items: Any, out_mm_kwargs: Any) -> Placeholders:
        config, item = self.info.get_hf_config(), out_mm_kwargs[update.modality][number]
        grid = grid_of(item[f"{update.modality}_grid_thw"].data, config)
        count = self.info.reducer.count_of(item, update.modality, grid)
        return self._placeholders(update.replacement(number), count, grid, pace_of(item, update.modality, config))

    def _grids(self, inputs: Mapping[str, Any]) -> list[list[Grid]]:
        config = self.info.get_hf_config()
        return [[grid_of(patches, config)] for patches in inputs.get("image_grid_thw", ())]

    def _placeholders(self, full: Any, count: int, grid: Grid, pace: float) -> Placeholders:
        """Select from the `full` placeholders of an image or a video the `count` that remain after the reducer."""
        return Placeholders(full[:count], positions=extent(grid, pace))


class ReducedQwen(OriginalPositions):
    """Mixin of a model: a reducer after vLLM's encoder."""

    config: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        make_room(self.get_language_model(), vllm_config.model_config)  # type: ignore[attr-defined]

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """Positions of an image or video: all tokens begin at its first position."""
        grid = grid_of(feature.data[f"{feature.modality}_grid_thw"].data, self.config)
        starts = np.zeros((DIMS, feature.mm_position.length), dtype=np.int64)
        return starts, self.extent(grid, pace_of(feature.data, feature.modality, self.config))

    def places(self, grid: Grid, pace: float) -> np.ndarray:
        """Positions `[n, 3]` of tokens, counted from the first."""
        return places(grid, pace)

    def extent(self, grid: Grid, pace: float) -> int:
        """Position of the text after an image or a video, counted from the first of its tokens."""
        return extent(grid, pace)

    # vllm/model_executor/models/qwen2_vl.py::Qwen2VLForConditionalGeneration._process_image_input returns rows of each image,
    # in order; `embed_multimodal` passes them unchanged to the encoder cache.
    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        images = super()._process_image_input(image_input)  # type: ignore[misc]
        return tuple(
            self.reduced(rows, grid_of(patches, self.config), ("image", number), 1.0, **self.decided(rows))
            for number, (rows, patches) in enumerate(zip(images, image_input["image_grid_thw"].tolist(), strict=True))
        )

    def _process_video_input(self, video_input: Any) -> tuple[Tensor, ...]:
        videos, patches = super()._process_video_input(video_input), video_input["video_grid_thw"].tolist()  # type: ignore[misc]
        seconds = video_input.get("second_per_grid_ts")
        seconds = [1.0] * len(patches) if seconds is None else seconds.flatten().tolist()
        return tuple(
            self.reduced(rows, grid_of(sides, self.config), ("video", number), each * _rate(self.config))
            for number, (rows, sides, each) in enumerate(zip(videos, patches, seconds, strict=True))
        )

    def reduced(self, rows: Tensor, grid: Grid, item: tuple[str, int], pace: float = 1.0, **signals: Tensor) -> Tensor:
        """Reduce the tokens `rows [n, d]` of one image or video; returns the remaining ones with their places.

        `item`: its modality and its number among those being encoded.
        """
        # vllm/model_executor/models/qwen3_vl.py::Qwen3_VisionTransformer.forward appends deepstack's levels as channels.
        features = rows[:, : self.config.get_text_config().hidden_size]  # after them those of deepstack
        result = self.reducer_of(*item, math.prod(grid)).reduce(grid, features, **signals)
        where = torch.from_numpy(self.places(grid, pace))
        # A merged token keeps the position of its anchor.
        anchors = sent(where, rows.device)[result.anchor]
        return pack(result.apply(rows), anchors, int(where.max()))

    # vllm/v1/worker/encoder_cudagraph.py::EncoderCudaGraphManager runs the tower itself and skips `_process_image_input`. Can
    # go when it calls the model's own method for the steps after the tower.
    def get_encoder_cudagraph_config(self) -> Any:
        """Name no modality for CUDA graphs, as recorded ones would bypass the reducer."""
        return dataclasses.replace(super().get_encoder_cudagraph_config(), modalities=[])  # type: ignore[misc]

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._execute_mm_encoder derives the tower's number of tokens from the
    # placeholders, which are fewer.
    def get_mm_lora_token_counts(self, *, modality: str, mm_kwargs: Any, num_mm_embeds: int) -> tuple[int, int | None]:
        """Numbers of tokens in encoder and projector, which process the full image."""
        if mm_kwargs is not None:
            num_mm_embeds = math.prod(grid_of(mm_kwargs[f"{modality}_grid_thw"].data, self.config))
        return super().get_mm_lora_token_counts(  # type: ignore[misc]
            modality=modality, mm_kwargs=mm_kwargs, num_mm_embeds=num_mm_embeds
        )

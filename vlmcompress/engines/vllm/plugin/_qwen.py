"""What the Qwen-VL families share: an image's grid and places, how many tokens stand for it, and its reduction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmcompress.engines.vllm.plugin._positions import DIMS, OriginalPositions, pack
from vlmcompress.engines.vllm.plugin._processing import ReducedInfo, ReducedProcessor
from vlmcompress.engines.vllm.plugin._reducing import Reducer
from vlmcompress.reducers import Grid


def grid_of(patches: Iterable[int], config: Any) -> Grid:
    """The grid of an image's or a video's tokens, from that of its patches."""
    t, h, w = (int(side) for side in patches)
    side = config.vision_config.spatial_merge_size
    return t, h // side, w // side


def places(grid: Grid, pace: float) -> np.ndarray:
    """`[n, 3]` int64: M-RoPE positions of the tokens from the first one on; frames are `pace` apart, rounded down."""
    found = np.indices(grid)
    if pace != 1:
        found[0] = (found[0] * pace).astype(np.int64)
    return found.reshape(DIMS, -1).T


class QwenInfo(ReducedInfo):
    """Counts of reduced images and videos."""

    def kept(self, grid: Grid) -> int:
        """How many tokens of an image or a video are kept."""
        return self.reducer.count(grid)

    def _get_vision_info(self, **arguments: Any) -> tuple[Any, int]:
        size, tokens = super()._get_vision_info(**arguments)  # type: ignore[misc]
        vision = self.get_hf_config().vision_config  # type: ignore[attr-defined]
        side = vision.patch_size * vision.spatial_merge_size
        rows, columns = size.height // side, size.width // side
        return size, self.kept((tokens // (rows * columns), rows, columns))


class QwenProcessor(ReducedProcessor):
    """Placeholders for as many tokens as are kept."""

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)  # type: ignore[misc]
        return [dataclasses.replace(update, replacement=self._shortened(update, out_mm_kwargs)) for update in updates]

    def _shortened(self, update: Any, out_mm_kwargs: Any) -> Any:
        config = self.info.get_hf_config()

        def replacement(item: int) -> Any:
            patches = out_mm_kwargs[update.modality][item][f"{update.modality}_grid_thw"].data
            return self._first(update.replacement(item), grid_of(patches, config))

        return replacement

    def _first(self, full: Any, grid: Grid) -> Any:
        """What stands for an image in the prompt, of what stood for it without a reducer."""
        return full[: self.info.kept(grid)]


class ReducedQwen(OriginalPositions):
    """vLLM's model with a reducer behind its encoder."""

    config: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.reducer = Reducer.of(self.config)

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """All tokens of an image or video begin where it begins."""
        ((_, *grid, pace),) = self.iter_mm_grid_thw([feature])  # type: ignore[attr-defined]
        extent = max(int((grid[0] - 1) * pace), grid[1] - 1, grid[2] - 1) + 1
        return np.zeros((DIMS, feature.mm_position.length), dtype=np.int64), extent

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        images = super()._process_image_input(image_input)  # type: ignore[misc]
        return tuple(
            self.reduced(rows, grid_of(patches, self.config))
            for rows, patches in zip(images, image_input["image_grid_thw"].tolist(), strict=True)
        )

    def _process_video_input(self, video_input: Any) -> tuple[Tensor, ...]:
        videos, patches = super()._process_video_input(video_input), video_input["video_grid_thw"].tolist()  # type: ignore[misc]
        seconds = video_input.get("second_per_grid_ts")
        seconds = [1.0] * len(patches) if seconds is None else seconds.flatten().tolist()
        rate = getattr(self.config.vision_config, "tokens_per_second", 1.0)
        return tuple(
            self.reduced_video(rows, grid_of(sides, self.config), each * rate)
            for rows, sides, each in zip(videos, patches, seconds, strict=True)
        )

    def reduced_video(self, rows: Tensor, grid: Grid, pace: float) -> Tensor:
        """The same of a video whose frames are `pace` positions apart."""
        return self.reduced(rows, grid, pace)

    def reduced(self, rows: Tensor, grid: Grid, pace: float = 1.0) -> Tensor:
        """What is left of the tokens `rows [n, d]` of one image or video, with their places."""
        result = self.reducer.reduce(grid, rows[:, : self.config.get_text_config().hidden_size])
        if len(result.anchor) != (count := self.reducer.count(grid)):
            raise ValueError(
                f"{self.reducer.chosen} kept {len(result.anchor)} of {math.prod(grid)} tokens, not {count}"
            )
        anchors = torch.from_numpy(places(grid, pace))[result.anchor.cpu()]
        return pack(result.apply(rows), anchors)

    def get_encoder_cudagraph_config(self) -> Any:
        """None of the modalities: recorded graphs would bypass the reducer."""
        config = super().get_encoder_cudagraph_config()  # type: ignore[misc]
        return dataclasses.replace(config, modalities=[])

    def get_mm_lora_token_counts(self, *, modality: str, mm_kwargs: Any, num_mm_embeds: int) -> tuple[int, int | None]:
        """Patches and tokens in encoder and projector, which see the full image."""
        if mm_kwargs is not None:
            num_mm_embeds = math.prod(grid_of(mm_kwargs[f"{modality}_grid_thw"].data, self.config))
        return super().get_mm_lora_token_counts(  # type: ignore[misc]
            modality=modality, mm_kwargs=mm_kwargs, num_mm_embeds=num_mm_embeds
        )

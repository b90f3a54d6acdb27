"""Qwen3-VL: deepstack features follow their tokens; of a video, each frame is reduced as an image.

A timestamp, as text, stands before every frame of a video, so the prompt says how many tokens each frame has before any of
them is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import PromptUpdateDetails

from vlmcompress.engines.vllm.plugin._positions import DIMS
from vlmcompress.engines.vllm.plugin._qwen import QwenInfo, QwenProcessor, ReducedQwen, grid_of
from vlmcompress.reducers import Grid

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
SIGNALS = ("features",)


class Info(QwenInfo, Qwen3VLProcessingInfo):
    """vLLM's, with the counts of reduced images and frames."""

    def kept(self, grid: Grid) -> int:
        """How many tokens of an image, or of all frames of a video, are kept."""
        return grid[0] * self.reducer.count((1, *grid[1:]))


class Processor(QwenProcessor, Qwen3VLMultiModalProcessor):
    """vLLM's, with as many placeholders as tokens are kept."""

    def _first(self, full: Any, grid: Grid) -> Any:
        """Of an image's placeholders the first; of a video's the first of each frame, and all text."""
        if isinstance(full, list):
            return super()._first(full, grid)
        visual, tokens = self.info.get_hf_config().video_token_id, grid[1] * grid[2]
        kept, seen, ids = self.info.kept((1, *grid[1:])), 0, []
        for token in full.full:
            if token != visual or seen % tokens < kept:
                ids.append(token)
            seen += token == visual
        return PromptUpdateDetails.select_token_id(ids, visual)


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=Qwen3VLDummyInputsBuilder)
class VlmcompressQwen3VLForConditionalGeneration(ReducedQwen, Qwen3VLForConditionalGeneration):
    """vLLM's Qwen3-VL with a reducer behind its encoder; it sees the last layer's features, not deepstack's."""

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """All tokens of a frame begin where it begins, and text counts on behind its full grid."""
        _, *sides = grid_of(feature.data[f"{feature.modality}_grid_thw"].data, self.config)
        visual = np.ones(feature.mm_position.length, dtype=bool)
        if feature.mm_position.is_embed is not None:
            visual = feature.mm_position.is_embed.numpy()
        begins = visual & ~np.append(False, visual[:-1])
        # Every text token takes one position, every frame as many as its longer side, all at its first token.
        ahead = np.append(0, np.cumsum(~visual + begins * max(sides)))
        starts = np.where(visual, ahead[1:] - max(sides), ahead[:-1])
        return np.broadcast_to(starts, (DIMS, len(visual))), int(ahead[-1])

    def reduced_video(self, rows: Tensor, grid: Grid, pace: float) -> Tensor:
        """Frame by frame."""
        return torch.cat([self.reduced(frame, (1, *grid[1:])) for frame in rows.chunk(grid[0])])

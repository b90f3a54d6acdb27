"""Shared code of Qwen3-VL and Qwen3.5: a video's timestamps stay between the remaining tokens of its frames.

The number of tokens that each frame keeps, and so the position of its timestamp, is not known when the prompt is built. The
prompt has one run of placeholders for the whole video, including text and marks, which the encoder's output fills.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor

from vlmcompress.engines.vllm.plugin._loading import embedded
from vlmcompress.engines.vllm.plugin._positions import DIMS, pack, unpack
from vlmcompress.engines.vllm.plugin._processing import Placeholders
from vlmcompress.engines.vllm.plugin._qwen import QwenInfo, QwenProcessor, ReducedQwen, grid_of
from vlmcompress.reduction.methods import Grid


class Qwen3Info(QwenInfo):
    """Mixin of a processing info with the counts of reduced images and videos."""

    # vllm/model_executor/models/qwen3_vl.py::Qwen3VLProcessingInfo.get_max_video_tokens does not count the tokens of
    # timestamps.
    def get_max_video_tokens(self, seq_len: int, mm_counts: Any) -> int:
        """The most tokens of a video, including timestamps."""
        parent: Any = super()
        tokens, video = parent.get_max_video_tokens(seq_len, mm_counts), parent.get_video_processor()
        mark = parent.get_tokenizer().encode("<99999.9 seconds>", add_special_tokens=False)
        frames = video.max_frames // video.temporal_patch_size
        return max(tokens, min(seq_len, tokens + frames * (len(mark) + 2)))


class Qwen3Processor(QwenProcessor):
    """Mixin of a processor: a placeholder for each kept token, and for each of the text in a video."""

    def _placeholders(self, full: Any, count: int, grid: Grid, pace: float) -> Placeholders:
        """Keep an image's first placeholders; a video has one for each of its tokens, including text."""
        if isinstance(full, list):
            return super()._placeholders(full, count, grid, pace)
        visual = self.info.get_hf_config().video_token_id
        text = len(full.full) - full.full.count(visual)
        return Placeholders([visual] * (text + count), positions=text + _sides(grid))


def _sides(grid: Grid) -> int:
    """Number of positions that the frames of a video take up, without the text between them."""
    return grid[0] * max(grid[1:])


class ReducedQwen3(ReducedQwen):
    """Mixin of a model that is a `Qwen3VLForConditionalGeneration`, with a reducer after its encoder."""

    _tokenizer: Any

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """Positions of an image or video: all its tokens, including text between frames, have its first position."""
        starts, end = super().span(feature)
        if feature.modality == "video":
            grid = grid_of(feature.data["video_grid_thw"].data, self.config)
            count = self.reducer.of_item(feature.data, "video", math.prod(grid)).count(grid)
            end = starts.shape[1] - count + _sides(grid)
        return starts, end

    def _process_video_input(self, video_input: Any) -> tuple[Tensor, ...]:
        videos = super(ReducedQwen, self)._process_video_input(video_input)  # type: ignore[misc]
        patches = video_input["video_grid_thw"].tolist()
        return tuple(
            self._with_text(rows, grid_of(sides, self.config), number, list(times))
            for number, (rows, sides, times) in enumerate(zip(videos, patches, video_input["timestamps"], strict=True))
        )

    def _with_text(self, rows: Tensor, grid: Grid, number: int, times: list[float]) -> Tensor:
        """Reduce the tokens `rows [n, d]` of video `number`; returns the remaining ones with places, between marks and
        `times` of its frames."""
        kept, where = unpack(self.reduced(rows, grid, ("video", number)))
        config, frame = self.config, where[:, 0]
        # vllm/model_executor/models/qwen3_vl.py::Qwen3VLMultiModalProcessor.get_video_repl writes a video in the prompt.
        ids = Qwen3VLMultiModalProcessor.get_video_repl(
            tokens_per_frame=frame.bincount(minlength=grid[0]).tolist(),
            timestamps=times,
            tokenizer=self._tokenizer,
            vision_start_token_id=config.vision_start_token_id,
            vision_end_token_id=config.vision_end_token_id,
            video_token_id=config.video_token_id,
        ).full
        tokens = torch.tensor(ids, device=rows.device)
        visual, starts = tokens == config.video_token_id, tokens == config.vision_start_token_id
        # A text token's position follows the text token before it or, after a frame, the end of the frame's longer side.
        text = (~visual).cumsum(0)
        places = text - 1 + (starts.cumsum(0) - starts.long()) * max(grid[1:])
        places = places[:, None].repeat(1, DIMS)
        places[visual] = where * places.new_tensor([0, 1, 1]) + (text[visual] + frame * max(grid[1:]))[:, None]
        out = rows.new_zeros(len(ids), rows.shape[1])
        out[visual] = kept
        words = embedded(self.get_language_model(), tokens[~visual])  # type: ignore[attr-defined]
        out[~visual, : words.shape[1]] = words.to(out)
        return pack(out, places)

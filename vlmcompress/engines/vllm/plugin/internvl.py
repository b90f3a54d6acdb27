"""InternVL (transformers' form of it): tiles one after the other, then the whole image as one more; a video is one grid.

A video's frames have text between them. The number of tokens that each frame keeps, and so the position of that text, is not
known when the prompt is built: the prompt has one run of placeholders for the whole video, which the encoder's output fills
with visual tokens and text.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.models.interns1 import (
    InternS1ForConditionalGeneration,
    InternS1MultiModalProcessor,
    InternS1ProcessingInfo,
)

from vlmcompress.engines.vllm.plugin._loading import embedded, sent
from vlmcompress.engines.vllm.plugin._positions import DIMS, longest_prompt, pack
from vlmcompress.engines.vllm.plugin._processing import Placeholders, register_processing
from vlmcompress.engines.vllm.plugin._tiles import TiledImages, TiledInfo, TiledProcessor
from vlmcompress.models import tile_grid
from vlmcompress.reduction.hooks.units import Reduced, join_reductions
from vlmcompress.reduction.methods import Grid

ARCHITECTURE = "InternVLForConditionalGeneration"
SIGNALS = ("features", "pixels", "keys", "heads")
COUNTED = True
VIDEOS = True


def script(processor: Any, frames: int, tokens: int) -> list[int]:
    """Token ids of a video in the prompt, including text, with `tokens` visual tokens per frame."""
    start, end, visual = processor.start_image_token, processor.end_image_token, processor.video_token * tokens
    text = "\n".join(f"Frame{number + 1}: {start}{visual}{end}" for number in range(frames))
    ids: list[int] = processor.tokenizer.encode(text, add_special_tokens=False)
    return ids


class Info(TiledInfo, InternS1ProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images and videos."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return vLLM's limits, without videos if counts depend on pixels."""
        return {"image": None, "video": 0 if self.reducer.counter or self.reducer.pixels else None}

    def largest(self) -> int:
        """Number of tokens of the largest image before it is reduced."""
        tokens: int = self.get_max_image_tokens()
        return tokens

    def film(self, frames: int) -> Grid:
        """The grid of a video's tokens."""
        _, rows, columns = tile_grid(self.ctx.get_hf_config())
        return frames, rows, columns

    def get_num_frames_with_most_features(self, seq_len: int, mm_counts: Mapping[str, int]) -> int:
        """The most frames together with the largest images: kept tokens must fit the prompt, all tokens the model's
        positions."""
        full, kept = self.tile()
        images, videos = mm_counts.get("image", 0), max(mm_counts.get("video", 0), 1)
        image, processor = self.get_max_image_tokens(), self.get_hf_processor()
        # An image has a mark at each end, and the prompt may have a beginning-of-text token.
        most = (longest_prompt(self.ctx.model_config) - images * (image + 2) - 1) // videos
        room = (seq_len - images * (image // full * kept + 2) - 1) // videos

        def too_many(frames: int) -> bool:
            text = len(script(processor, frames, 0))
            return text + frames * full > most or text + self.reducer.largest.count(self.film(frames)) > room

        return max(bisect.bisect(range(1, max(most // full, 1) + 1), False, key=too_many), 1)


class Processor(TiledProcessor, InternS1MultiModalProcessor):
    """vLLM's processor of the family, with cache keys that depend on the reducer."""

    def _shortened(self, update: Any, number: int, mm_items: Any, out_mm_kwargs: Any) -> Placeholders:
        """Shorten an image's placeholders as for other tiles; a video has one for each of its tokens, including text."""
        if update.modality == "image":
            return super()._shortened(update, number, mm_items, out_mm_kwargs)
        content, (visual,) = update.resolve(number).content, update.target
        full, _ = self.info.tile()
        tokens = content.full.count(visual)
        reducer = self.info.reducer.of_item(out_mm_kwargs["video"][number], "video", tokens)
        rest = len(content.full) - tokens + reducer.count(self.info.film(tokens // full))
        return Placeholders([visual] * rest, positions=len(content.full))


@register_processing(Info, Processor)
class VlmcompressInternVLForConditionalGeneration(TiledImages, InternS1ForConditionalGeneration):
    """vLLM's model of the family, with a reducer in its encoder or after the projector."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        from vllm.transformers_utils.processor import cached_processor_from_config

        self._processor: Any = cached_processor_from_config(vllm_config.model_config)

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """Positions of a video: all its tokens, including text between frames, have its first position."""
        if feature.modality == "image":
            return super().span(feature)
        grid, tokens = self._film(feature.data["video_num_patches"].data), feature.mm_position.length
        kept = self.reducer.of_item(feature.data, "video", math.prod(grid)).count(grid)
        return np.zeros((DIMS, tokens), np.int64), tokens - kept + math.prod(grid)

    def _film(self, frames: Any) -> Grid:
        return int(frames), *self.grid[1:]

    # vllm/model_executor/models/interns1.py::InternS1ForConditionalGeneration._process_vision_input handles images and videos,
    # distinguished by `type`.
    def _process_vision_input(self, image_input: Any) -> tuple[Tensor, ...]:
        items = super()._process_vision_input(image_input)
        if image_input["type"] == "pixel_values":
            return tuple(self._reduced(rows, number) for number, rows in enumerate(items))
        films = [self._film(frames) for frames in image_input["num_patches"]]
        return tuple(
            self._with_text(rows, grid, number) for number, (rows, grid) in enumerate(zip(items, films, strict=True))
        )

    def _with_text(self, rows: Tensor, grid: Grid, number: int) -> Tensor:
        """Reduce the tokens `rows [n, d]` of video `number`; returns the remaining ones and the text around frames, with
        places."""
        ids = torch.tensor(script(self._processor, grid[0], math.prod(self.grid)))
        visual: Any = ids == self.video_context_token_id
        columns, text, words = (
            sent(x, rows.device) for x in (visual.nonzero()[:, 0], (~visual).nonzero()[:, 0], ids[~visual])
        )
        every = rows.new_zeros(len(ids), rows.shape[1])
        every[columns] = rows
        every[text] = embedded(self.get_language_model(), words).to(rows)
        reducer = self.reducer_of("video", number, len(rows))
        reduction = self._merging.take(grid[0]) if self._merging else reducer.reduce(grid, rows)
        result = join_reductions([Reduced(0, columns, grid, 0, (0, len(ids)), reduction)], rows.device)
        return pack(result.apply(every), result.anchor[:, None].expand(-1, DIMS), len(ids) - 1)

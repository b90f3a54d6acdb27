"""LLaVA-1.5: one grid for every image, all of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmcompress.engines.vllm.plugin._encoder import EncoderMerging, Scan, grid_of
from vlmcompress.engines.vllm.plugin._llava import LlavaInfo, LlavaProcessor, LlavaShaped
from vlmcompress.engines.vllm.plugin._processing import CountedInfo, CountedProcessor, counts_of
from vlmcompress.reduction.methods import Grid, Reduction
from vlmcompress.reduction.support import needs_encoder

ARCHITECTURE = "LlavaForConditionalGeneration"
SIGNALS = ("features", "pixels", "saliency", "windowed", "keys", "heads")
COUNTED = True


class Info(CountedInfo, LlavaInfo, LlavaProcessingInfo):
    """vLLM's processing info of the family, with the counts of reduced images."""


class Processor(LlavaProcessor, CountedProcessor, LlavaMultiModalProcessor):
    """vLLM's processor of the family, with cache keys that depend on the reducer."""

    def _grids(self, inputs: Mapping[str, Any]) -> list[list[Grid]]:
        config = self.info.get_hf_config()
        return [[grid_of(torch.as_tensor(image), config)] for image in inputs.get("pixel_values", ())]


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=LlavaDummyInputsBuilder)
class VlmcompressLlavaForConditionalGeneration(LlavaShaped, LlavaForConditionalGeneration):
    """vLLM's model of the family, with a reducer in its encoder, before its projector or after it."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        reducer = self.reducer.chosen.reducer
        self._merging = self._scan = None
        self._counts: list[int] | None = None  # counts of the images being encoded
        tower: Any = self.vision_tower
        if self.reducer.merges:
            self._merging = EncoderMerging(tower.vision_model.encoder.layers, self.reducer, self.config)
        elif needs_encoder(reducer):
            self._scan = Scan(tower.vision_model.encoder.layers, reducer.shallow)

    def _size(self, item: Any) -> tuple[int, int]:
        side = self.config.vision_config.image_size
        return side, side

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode, reduce and project images."""
        self._counts = counts_of(kwargs)
        return super().embed_multimodal(**kwargs)

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        pixels = image_input["pixel_values"]
        grid = grid_of(pixels, self.config)
        merger = self._merging.begin([grid] * len(pixels), pixels.device, self._counts) if self._merging else None
        # vllm/model_executor/models/llava.py::LlavaForConditionalGeneration._process_image_input also projects; only its first
        # half is called here, as methods of stage "encoder" reduce before the projector.
        features: Any = super()._process_image_pixels(image_input)
        if merger is not None:
            return self._projected(features, merger.merged)
        signals = [self._scan.of(number) if self._scan else {} for number in range(len(pixels))]
        if self.reducer.chosen.reducer.STAGE == "encoder":
            reductions = [
                self.reducer_of("image", number, len(rows)).reduce(grid, rows, **image_signals)
                for number, (rows, image_signals) in enumerate(zip(features, signals, strict=True))
            ]
            # Requests may keep different shares; the projector takes row by row.
            images = zip(reductions, features, strict=True)
            features = pad_sequence([reduction.apply(rows) for reduction, rows in images], batch_first=True)
            return self._projected(features, reductions)
        rows = self.multi_modal_projector(features)
        return self._reduced(rows, [image.shape[-2:] for image in pixels], signals.__getitem__)

    def _projected(self, features: Tensor, reductions: Sequence[Reduction]) -> tuple[Tensor, ...]:
        """Project the reduced `features [images, rows, c]`; returns rows with their places."""
        images = zip(self.multi_modal_projector(features), reductions, strict=True)
        return tuple(self._placed(rows[: len(reduction.anchor)], reduction) for rows, reduction in images)

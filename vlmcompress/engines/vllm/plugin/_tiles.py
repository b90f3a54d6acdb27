"""Shared code of families that cut an image into square tiles with text between them; each tile is reduced on its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFieldConfig

from vlmcompress.engines.vllm.plugin._encoder import TileMerging
from vlmcompress.engines.vllm.plugin._positions import DIMS, OriginalPositions, PlainRope, pack
from vlmcompress.engines.vllm.plugin._processing import (
    FIELD,
    Counting,
    Placeholders,
    ReducedInfo,
    ReducedProcessor,
    counts_of,
)
from vlmcompress.engines.vllm.plugin._served_reducer import UNITS
from vlmcompress.models import spec_for, tile_grid
from vlmcompress.reduction.methods import Grid


class TiledInfo(ReducedInfo):
    """Mixin of a processing info, put before the family's class."""

    # vllm/multimodal/encoder_budget.py::get_mm_max_toks_per_item encodes a blank image to reserve memory if this returns None.
    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int] | None:
        """Return the most tokens of an image if they depend on its pixels, as vLLM's blank images may have few."""
        if self.reducer.counter is None and not self.reducer.pixels:
            return None
        full, most = self.tile()
        return {"image": self.largest() // full * most}

    def largest(self) -> int:
        """Number of tokens of the largest image before it is reduced."""
        info: Any = self
        processor = info.get_hf_processor()
        edge = processor.image_processor.max_image_size["longest_edge"]
        tokens: int = info.get_num_image_tokens(image_width=edge, image_height=edge, processor=processor, mm_kwargs={})
        return tokens

    def tile(self) -> tuple[int, int]:
        """Number of tokens of a tile, and number of kept ones, or the maximum if that depends on its pixels or the request."""
        grid = tile_grid(self.get_hf_config())  # type: ignore[attr-defined]
        return math.prod(grid), self.reducer.largest.count(grid)


class TiledProcessor(Counting, ReducedProcessor):
    """Mixin of a processor, put before the family's class: a placeholder for each kept token of a tile."""

    def _field(self, hf_inputs: Any) -> Any:
        return MultiModalFieldConfig.flat_from_sizes("image", _tiles_in(hf_inputs), keep_on_cpu=True)

    def _grids(self, inputs: Mapping[str, Any]) -> list[list[Grid]]:
        grid = tile_grid(self.info.get_hf_config())
        return [[grid] * tiles for tiles in _tiles_in(inputs).tolist()]

    def _shortened(self, update: Any, number: int, mm_items: Any, out_mm_kwargs: Any) -> Placeholders:
        """Keep the text between tiles and the first tokens of each tile of vLLM's placeholders."""
        content = update.resolve(number).content
        # vllm/multimodal/processing/processor.py::PromptUpdateDetails marks the tokens that encoder rows fill with `is_embed`.
        visual = content.is_embed(content.full)
        item, tokens = out_mm_kwargs["image"][number], int(visual.sum())
        grid = tile_grid(self.info.get_hf_config())
        full, place = math.prod(grid), visual.cumsum(0) - 1
        counts = _counts_by_content(item, full)
        if counts is None:
            counts = torch.full((tokens // full,), self.info.reducer.of_item(item, "image", tokens).count(grid))
        stays = ~visual | (place % full < counts[place.clamp(min=0) // full])
        ids = torch.tensor(content.full)[stays].tolist()
        return Placeholders(ids, content.is_embed, positions=len(content.full))


def _tiles_in(inputs: Mapping[str, Any]) -> Tensor:
    """Numbers of tiles of the images in a processor's output."""
    tiles: Tensor = inputs.get("image_num_patches", inputs.get("num_patches", torch.empty(0, dtype=torch.int64)))
    return tiles


def _counts_by_content(item: Any, full: int) -> Tensor | None:
    """How many of its `full` tokens each tile of a processed image keeps; None where that does not depend on what it shows."""
    if FIELD in item:
        counted: Tensor = item[FIELD].data
        return counted
    return item[UNITS].data.view(-1, full).sum(1) if UNITS in item else None


def tiles_of(item: Any) -> int:
    """Number of tiles of a processed image, or of frames of a video."""
    return len(item["pixel_values" if "pixel_values" in item else "pixel_values_videos"].data)


class TiledImages(OriginalPositions, PlainRope):
    """Mixin of a model, put before the family's class: reduces the tokens of each tile, in the encoder or after the
    projector."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = vllm_config.model_config.hf_config
        self.grid, self._merging = tile_grid(config), None
        if self.reducer.merges:
            spec = spec_for({"model_type": config.model_type})
            model: Any = self
            layers = model.get_submodule(spec.engine_name(spec.vision_layers))
            self._merging = TileMerging(layers, self.reducer, config)

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """Positions of an image: text between tiles is unreduced, all rows of a tile have its first position."""
        place = feature.mm_position
        visual = np.ones(place.length, bool) if place.is_embed is None else place.is_embed.numpy()
        last = np.zeros(place.length, bool)  # whether it is the last token of a tile
        last[visual.nonzero()[0][self._ends(feature.data, int(visual.sum()))]] = True
        steps = np.where(visual, last * math.prod(self.grid), 1)
        ends = steps.cumsum()
        return np.broadcast_to(ends - steps, (DIMS, place.length)), int(ends[-1])

    def _ends(self, item: Any, tokens: int) -> np.ndarray:
        """The index of the last token of each tile among the `tokens` remaining tokens of an image."""
        counts = _counts_by_content(item, math.prod(self.grid))
        if counts is not None:
            ends: np.ndarray = counts.cumsum(0).numpy() - 1
            return ends
        kept = tokens // tiles_of(item)
        return np.arange(kept, tokens + 1, kept) - 1

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode, reduce and project images."""
        counts = counts_of(kwargs)
        if self._merging:
            self._merging.counts = counts
        return super().embed_multimodal(**kwargs)

    def _process_image_input(self, image_input: Any) -> Any:
        images = super()._process_image_input(image_input)  # type: ignore[misc]
        return tuple(self._reduced(rows, number) for number, rows in enumerate(images))

    def _reduced(self, rows: Tensor, number: int) -> Tensor:
        """Reduce the tiles `rows [tiles * n, d]` of image `number`; returns the remaining rows with their places in tiles."""
        parts, tiles = [], rows.split(math.prod(self.grid))
        if self._merging:
            results = [self._merging.take(1) for _ in tiles]
        else:
            reducer = self.reducer_of("image", number, len(rows))
            results = reducer.reduce_all(
                [{"grid": self.grid, "features": tile_rows, **self.decided(tile_rows)} for tile_rows in tiles]
            )
        for tile_rows, result in zip(tiles, results, strict=True):
            anchors = result.anchor[:, None].expand(-1, DIMS)
            parts.append(pack(result.apply(tile_rows), anchors, math.prod(self.grid) - 1))
        return torch.cat(parts)

    # vllm/v1/worker/encoder_cudagraph.py::EncoderCudaGraphManager; see `_qwen`.
    def get_encoder_cudagraph_config(self) -> Any:
        """Name no modality for CUDA graphs, as recorded ones would bypass the reducer."""
        return dataclasses.replace(super().get_encoder_cudagraph_config(), modalities=[])  # type: ignore[misc]

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._execute_mm_encoder; see `_qwen`. `mm_kwargs` is None in the memory
    # profile (vllm/lora/model_manager.py::LoRAModelManager).
    def get_mm_lora_token_counts(self, *, modality: str, mm_kwargs: Any, num_mm_embeds: int) -> tuple[int, int | None]:
        """Numbers of tokens in encoder and projector, which process full tiles."""
        tiles = num_mm_embeds // self.reducer.largest.count(self.grid) if mm_kwargs is None else tiles_of(mm_kwargs)
        num_mm_embeds = tiles * math.prod(self.grid)
        return super().get_mm_lora_token_counts(  # type: ignore[misc]
            modality=modality, mm_kwargs=mm_kwargs, num_mm_embeds=num_mm_embeds
        )

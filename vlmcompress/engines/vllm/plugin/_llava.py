"""Shared code of the families of LLaVA's shape: an image's grids, its number of placeholders, and its reduction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vlmcompress.engines.vllm.plugin._loading import sent
from vlmcompress.engines.vllm.plugin._positions import DIMS, OriginalPositions, PlainRope, pack
from vlmcompress.engines.vllm.plugin._processing import Placeholders, ReducedInfo, ReducedProcessor
from vlmcompress.engines.vllm.plugin._served_reducer import UNITS, ServedReducer
from vlmcompress.models import Layout, ModelSpec, spec_for
from vlmcompress.reduction.hooks.units import Unit, join_reductions
from vlmcompress.reduction.methods import Grid, Reduction, grouped


@functools.cache
def _spec(model_type: str) -> ModelSpec:
    return spec_for({"model_type": model_type})


def kept(layout: Layout, reducer: ServedReducer) -> int:
    """Number of tokens that an image keeps; newlines are all kept."""
    sides = [(piece.rows, piece.columns) for piece in layout.pieces if piece.rows * piece.columns]
    return layout.tokens + sum(reducer.count((1, rows, columns)) - rows * columns for rows, columns in sides)


class LlavaInfo(ReducedInfo):
    """Mixin of a processing info, put before the family's class."""

    # vllm/model_executor/models/llava.py::LlavaProcessingInfo.get_num_image_tokens determines the placeholders of the family's
    # processor and the memory profile.
    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """The most placeholders of an image of that size in the prompt."""
        return kept(self.layout(image_width, image_height), self.reducer.largest)

    def layout(self, width: int, height: int) -> Layout:
        """Layout of the tokens of an image of that size before they are reduced."""
        info: Any = self
        return _spec(info.get_hf_config().model_type).layout(info.get_hf_processor(), width, height, 1)

    def lengths(self, modality: str, items: Any, number: int, item: Any) -> tuple[int, int]:
        """Number of tokens of item `number` of `items`, before it is reduced and after; `item`: its processed form."""
        size = items.get_image_size(number)
        layout = self.layout(size.width, size.height)
        if UNITS in item:
            return layout.tokens, int(item[UNITS].data.sum())
        return layout.tokens, kept(layout, self.reducer.of_item(item, modality, layout.tokens))


class LlavaProcessor(ReducedProcessor):
    """Mixin of a processor, put before the family's class."""

    def _shortened(self, update: Any, number: int, mm_items: Any, out_mm_kwargs: Any) -> Placeholders:
        modality = update.modality
        positions, count = self.info.lengths(modality, mm_items[modality], number, out_mm_kwargs[modality][number])
        return Placeholders(update.resolve(number).content.full[:count], positions=positions)


class LlavaShaped(OriginalPositions, PlainRope):
    """Mixin of a model, put before the family's class: reduces the tokens of images after encoder and projector."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        from vllm.transformers_utils.processor import cached_processor_from_config

        self._processor = cached_processor_from_config(vllm_config.model_config)
        self._spec = _spec(vllm_config.model_config.hf_config.model_type)

    def span(self, feature: Any) -> tuple[np.ndarray, int]:
        """Positions of an image: all 0, as places are added with its rows; text continues at its unreduced position."""
        height, width = self._size(feature.data)
        return np.zeros((DIMS, feature.mm_position.length), np.int64), self._layout(height, width).tokens

    def _size(self, item: Any) -> tuple[int, int]:
        """Height and width of an image in its processor's output."""
        height, width = item["image_sizes"].data.tolist()
        return height, width

    def _layout(self, height: int, width: int) -> Layout:
        return self._spec.layout(self._processor, width, height, 1)

    def _reduced(
        self,
        images: Iterable[Tensor],
        sizes: Iterable[tuple[int, int]],
        signals: Callable[[int], dict[str, Any]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Reduce each image; returns the remaining rows with their places.

        Args:
            images: rows `[n, d]` of each image, after the projector.
            sizes: height and width of each image.
            signals: function that returns the encoder's signals for image i, whose tokens form one grid.
        """
        every, tiles = list(images), []
        for number, (rows, size) in enumerate(zip(every, sizes, strict=True)):
            layout = self._layout(*size)
            if len(rows) != layout.tokens:
                raise ValueError(f"an image became {len(rows)} tokens, its size asks for {layout.tokens}")
            image_signals = self.decided(rows) | (signals(number) if signals else {})
            tiles.append((rows, layout.grids(), image_signals, self.reducer_of("image", number, layout.tokens)))
        reductions = zip(every, self._reductions(tiles), strict=True)
        return tuple(self._placed(result.apply(rows), result) for rows, result in reductions)

    def _reductions(
        self, images: Sequence[tuple[Tensor, Iterable[tuple[Grid, Sequence[int]]], dict[str, Any], ServedReducer]]
    ) -> list[Reduction]:
        """Reduce all tiles of images together. Each image: `rows [n, d]`, grids with the indices of their rows, signals, and
        reducer."""
        units: list[list[Unit]] = []
        tiles: list[tuple[ServedReducer, dict[str, Any]]] = []
        for rows, grids, signals, reducer in images:
            units.append([])
            for grid, index in grids:
                columns = sent(index, rows.device)
                tiles.append((reducer, {"grid": grid, "features": rows[columns], **signals}))
                units[-1].append(Unit(0, columns, grid, 0, (0, len(rows))))
        # All tiles of all images of the step at once: those of one shape and share use every kernel together.
        results = grouped(tiles, ServedReducer.reduce_all)
        return [
            join_reductions([unit.reduced(next(results)) for unit in parts], parts[0].columns.device) for parts in units
        ]

    def _placed(self, rows: Tensor, reduction: Reduction) -> Tensor:
        """Pack `rows [m, d]`, one for each output of `reduction`, with their places in the image."""
        return pack(rows, reduction.anchor.to(rows.device)[:, None].expand(-1, DIMS), len(reduction.target) - 1)

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._execute_mm_encoder; see `_qwen`.
    def get_mm_lora_token_counts(self, *, modality: str, mm_kwargs: Any, num_mm_embeds: int) -> tuple[int, int | None]:
        """Numbers of tokens in encoder and projector, which process the full image."""
        if mm_kwargs is not None:
            num_mm_embeds = self._layout(*self._size(mm_kwargs)).tokens
        return super().get_mm_lora_token_counts(  # type: ignore[misc]
            modality=modality, mm_kwargs=mm_kwargs, num_mm_embeds=num_mm_embeds
        )

"""Mixins of vLLM's multimodal processors and of the objects that tell them about the model; put before vLLM's classes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.multimodal.parse import EmbeddingItems
from vllm.multimodal.processing import PromptUpdateDetails

from vlmcompress.engines.vllm.plugin._reducer import ServedReducer
from vlmcompress.engines.vllm.plugin._resuming import ResumableProcessor
from vlmcompress.engines.vllm.plugin._rope import longest_prompt


@dataclasses.dataclass
class Placeholders(PromptUpdateDetails):
    """Placeholders of an image or a video in the prompt, and the number of positions that they take up there."""

    positions: int = 0


class ReducedInfo:
    """Mixin of a `BaseProcessingInfo` that gives the reducer."""

    @functools.cached_property
    def reducer(self) -> ServedReducer:
        """The reducer of the checkpoint."""
        return ServedReducer.of(self.get_hf_config())  # type: ignore[attr-defined]


class ReducedProcessor(ResumableProcessor):
    """Mixin of a `BaseMultiModalProcessor`: fewer placeholders in the prompt, and names in caches that include the reducer.

    vLLM names an image by its content, the model and the processor's arguments. Within an engine that is enough, for it has
    one reducer; a store that outlives the engine may know the folder with another one.
    """

    info: Any

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process as vLLM does. ValueError, which a server answers with status 400, for embeddings in place of images."""
        if any(isinstance(items, EmbeddingItems) for items in inputs.mm_data_items.values()):
            raise ValueError("this checkpoint reduces visual tokens itself; send images, not embeddings of them")
        return super().apply(inputs, timing_ctx)  # type: ignore[misc]

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        """Make vLLM's updates of the prompt, with placeholders for the kept tokens of each image and video."""
        own: Any = super()
        updates = own._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)

        def shorter(update: Any) -> Any:
            return lambda number: self._shortened(update, number, mm_items, out_mm_kwargs)

        return [dataclasses.replace(update, replacement=shorter(update)) for update in updates]

    def _shortened(self, update: Any, number: int, mm_items: Any, out_mm_kwargs: Any) -> Placeholders:
        """Shorten vLLM's `update` to the placeholders of item `number` of its modality that are left."""
        raise NotImplementedError

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> tuple[list[int], Any]:
        """Update the prompt as vLLM does. ValueError, answered with status 400, if positions exceed those of the model."""
        tokens, placeholders = super()._maybe_apply_prompt_updates(mm_items, mm_res)  # type: ignore[misc]
        contents = [update.content for items in mm_res.prompt_updates.values() for (update,) in items]
        dropped = 0 if self.info.reducer.compact else sum(one.positions - len(one.full) for one in contents)
        end = len(tokens) + dropped
        if end > (most := longest_prompt(self.info.ctx.model_config)):
            raise ValueError(
                f"the prompt ends at position {end}, counted before images and videos are reduced, and the model knows "
                f"{most}; send fewer images, shorter videos or less text"
            )
        return tokens, placeholders

    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        own: dict[str, list[str]] = super()._get_mm_hashes(inputs)  # type: ignore[misc]
        mark = self.info.reducer.fingerprint
        return {modality: [f"{name}-{mark}" for name in names] for modality, names in own.items()}

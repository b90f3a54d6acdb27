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
    """What stands for an image or a video in the prompt, and how many positions it takes up there."""

    positions: int = 0


class ReducedInfo:
    """Of a `BaseProcessingInfo`: knows the reducer."""

    @functools.cached_property
    def reducer(self) -> ServedReducer:
        """The reducer of the checkpoint."""
        return ServedReducer.of(self.get_hf_config())  # type: ignore[attr-defined]


class ReducedProcessor(ResumableProcessor):
    """Of a `BaseMultiModalProcessor`: fewer tokens in the prompt, and names in caches that differ between reducers.

    vLLM names an image by its content, the model and the processor's arguments. Within an engine that is enough, for it has
    one reducer; a store that outlives the engine may know the folder with another one.
    """

    info: Any

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """vLLM's. ValueError, which a server answers with status 400, for embeddings in place of images."""
        if any(isinstance(items, EmbeddingItems) for items in inputs.mm_data_items.values()):
            raise ValueError("this checkpoint reduces visual tokens itself; send images, not embeddings of them")
        return super().apply(inputs, timing_ctx)  # type: ignore[misc]

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        """vLLM's, with what is left of the tokens of each image and video."""
        own: Any = super()
        updates = own._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)

        def shorter(update: Any) -> Any:
            return lambda number: self._shortened(update, number, mm_items, out_mm_kwargs)

        return [dataclasses.replace(update, replacement=shorter(update)) for update in updates]

    def _shortened(self, update: Any, number: int, mm_items: Any, out_mm_kwargs: Any) -> Placeholders:
        """What stands for item `number` of the update's modality; `update` is vLLM's."""
        raise NotImplementedError

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> tuple[list[int], Any]:
        """vLLM's. ValueError, which a server answers with status 400, for a prompt whose positions end too far on."""
        tokens, placeholders = super()._maybe_apply_prompt_updates(mm_items, mm_res)  # type: ignore[misc]
        contents = [update.content for items in mm_res.prompt_updates.values() for (update,) in items]
        end = len(tokens) + sum(content.positions - len(content.full) for content in contents)
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

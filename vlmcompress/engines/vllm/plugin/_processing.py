"""Mixins of vLLM's multimodal processors and of the objects that tell them about the model; put before vLLM's classes."""

from __future__ import annotations

import functools
from typing import Any

from vlmcompress.engines.vllm.plugin._reducing import Reducer
from vlmcompress.engines.vllm.plugin._resuming import ResumableProcessor


class ReducedInfo:
    """Of a `BaseProcessingInfo`: knows the reducer."""

    @functools.cached_property
    def reducer(self) -> Reducer:
        """The reducer of the checkpoint."""
        return Reducer.of(self.get_hf_config())  # type: ignore[attr-defined]


class ReducedProcessor(ResumableProcessor):
    """Of a `BaseMultiModalProcessor`: images have names in caches that differ between reducers.

    vLLM names an image by its content, the model and the processor's arguments. Within an engine that is enough, for it has
    one reducer; a store that outlives the engine may know the folder with another one.
    """

    info: Any

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """vLLM's. ValueError, which a server answers with status 400, for embeddings in place of images."""
        from vllm.multimodal.parse import EmbeddingItems

        if any(isinstance(items, EmbeddingItems) for items in inputs.mm_data_items.values()):
            raise ValueError("this checkpoint reduces visual tokens itself; send images, not embeddings of them")
        return super().apply(inputs, timing_ctx)  # type: ignore[misc]

    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        own: dict[str, list[str]] = super()._get_mm_hashes(inputs)  # type: ignore[misc]
        mark = self.info.reducer.fingerprint
        return {modality: [f"{name}-{mark}" for name in names] for modality, names in own.items()}

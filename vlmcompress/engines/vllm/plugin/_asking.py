"""Pass the question to query-aware methods: from the prompt to the reducer, and into the cache keys of images.

The question is all words of the prompt, or the value of `mm_processor_kwargs: {"query": ...}` in a request, which a server
accepts only with `--trust-request-mm-kwargs` (`vlmcompress serve` adds it for query-aware methods). As a processor argument it
is part of an image's cache key, so the same image with another question is another entry.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlmcompress.engines.vllm.plugin._loading import sent
from vlmcompress.engines.vllm.plugin._served_reducer import QUERY
from vlmcompress.models import spec_for
from vlmcompress.reduction.hooks.units import special_ids

FIELD = "query_ids"


class AskingProcessor:
    """Mixin of a multimodal processor, put before vLLM's class: adds the question's token ids `[q]` to each image."""

    info: Any

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process a request as vLLM does, with the question among its arguments if the method is query-aware."""
        reducer, kwargs = self.info.reducer, dict(inputs.hf_processor_mm_kwargs)
        # Methods that choose among images have read the question already (`_views`).
        if reducer.chosen.query_aware and not reducer.views and inputs.mm_data_items:
            # vllm/multimodal/processing/inputs.py::ProcessorInputs.get_mm_hashes hashes these arguments, so that an image has
            # a separate key for each question.
            kwargs[QUERY] = self._words_of(QUERY, kwargs[QUERY]) if QUERY in kwargs else self._words(inputs.prompt)
            inputs = dataclasses.replace(inputs, hf_processor_mm_kwargs=kwargs)
        return super().apply(inputs, timing_ctx)  # type: ignore[misc]

    def _words_of(self, argument: str, text: Any) -> list[int]:
        """Token ids of the words in a request's argument. ValueError unless it is a text within the context's length.

        Token ids are refused: the model would look up any number in its table of words.
        """
        if not isinstance(text, str):
            raise ValueError(f"'{argument}' must be a text, got {reprlib.repr(text)}")
        words, most = self._words(text), self.info.ctx.model_config.max_model_len
        if len(words) > most:
            raise ValueError(f"'{argument}' has {len(words)} tokens, and the context {most}; send a shorter text")
        return words

    def _words(self, text: str | list[int]) -> list[int]:
        """Token ids of the words in a text, or in a prompt's tokens."""
        ids = self.info.get_tokenizer().encode(text, add_special_tokens=False) if isinstance(text, str) else text
        return [token for token in ids if token not in self._special_ids]

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        return special_ids(self.info.get_tokenizer(), self._placeholder)

    @property
    def _placeholder(self) -> int:
        """Id of the image placeholder in the prompt."""
        config = self.info.get_hf_config()
        return int(getattr(config, spec_for({"model_type": config.model_type}).image_token))

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        data = super()._apply_hf_processor_main(mm_items, hf_kwargs)  # type: ignore[misc]
        if QUERY in hf_kwargs and (images := mm_items.get_all_counts().get("image", 0)):
            data[FIELD] = torch.tensor(hf_kwargs[QUERY], dtype=torch.int64).expand(images, -1)
        return data

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        from vllm.multimodal.inputs import MultiModalFieldConfig

        fields = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)  # type: ignore[misc]
        return {**fields, FIELD: MultiModalFieldConfig.batched("image", keep_on_cpu=True)}


class AskingModel:
    """Mixin of a model, put before vLLM's class: stores the question's embeddings for each image being encoded."""

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode images as the model does, and store their questions."""
        self._questions = kwargs.pop(FIELD, None)
        return super().embed_multimodal(**kwargs)  # type: ignore[misc]

    def question(self, image: int) -> dict[str, Tensor]:
        """The field `query [q, d]` of `Signals` for one of the images being encoded; empty unless the method is
        query-aware."""
        if self._questions is None:
            return {}
        language_model = self.get_language_model()  # type: ignore[attr-defined]
        device = next(language_model.parameters()).device
        return {"query": embedded(language_model, sent(self._questions[image].flatten(), device))}


def embedded(language_model: Any, ids: Tensor) -> Tensor:
    """Embed words `ids [n]` that are not tokens of the current step, without LoRA adapters: `[n, d]`.

    vLLM's layer with adapters assumes that its input are the step's tokens, each with its request's adapter.
    """
    model = language_model.model
    # vllm/lora/layers/vocab_parallel_embedding.py::VocabParallelEmbeddingWithLoRA.forward indexes adapters by the step's
    # tokens.
    table = model.embed_tokens
    model.embed_tokens = getattr(table, "base_layer", table)
    try:
        rows: Tensor = language_model.embed_input_ids(ids)
    finally:
        model.embed_tokens = table
    return rows

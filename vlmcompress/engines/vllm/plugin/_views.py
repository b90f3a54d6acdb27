"""Choose among a request's images before any is encoded: one that is left out becomes a single token and is not encoded.

The processor has the whole request: the prompt with the names of the images and the question, and the number of images. It
decides for all of them together, before vLLM's caches, which handle images separately; the decisions are passed with the
images and are part of their cache keys. An image that stays has the same key for all questions, since its rows are the same,
and a different key if it is left out. Rows of the embedding table are memory-mapped from the checkpoint's files, as the
processor has no model.

A request may specify names and question itself, with `mm_processor_kwargs: {"names": ["front", ...], "query": ...}`.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlmcompress import models
from vlmcompress.engines.vllm.plugin._asking import embedded
from vlmcompress.engines.vllm.plugin._positions import DIMS, pack
from vlmcompress.engines.vllm.plugin._processing import Placeholders
from vlmcompress.engines.vllm.plugin._served_reducer import QUERY, STAYS
from vlmcompress.reduction.hooks import views
from vlmcompress.utils import hub, tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import FLOATS

NAMES = "names"
TABLE = ".embed_tokens.weight"


class ViewsProcessor:
    """Mixin of a multimodal processor, put before `AskingProcessor`: decides for each image whether it stays."""

    info: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.info.reducer.views:  # refuses a checkpoint without an embedding table at the start, not in a request
            self._table = table_of(self.info.get_hf_config().name_or_path)

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process a request as vLLM does. ValueError for names with a method that does not choose, or if there is not one per
        image."""
        kwargs = {name: value for name, value in inputs.hf_processor_mm_kwargs.items() if name != STAYS}
        if not self.info.reducer.views:
            if NAMES in kwargs:
                raise ValueError(f"{self.info.reducer.chosen} does not choose among images; leave out '{NAMES}'")
        elif images := inputs.mm_data_items.get_all_counts().get("image", 0):
            words = self._named(inputs.prompt, images, kwargs.pop(NAMES, None), kwargs.pop(QUERY, None))
            stays = words and views.kept_images(
                self.info.reducer.chosen, self._tokenizer, self._table.__getitem__, words
            )
            kwargs[STAYS] = stays or [True] * images
        # vllm/multimodal/processing/processor.py::BaseMultiModalProcessor.apply looks up its cache first, image by image, so
        # the choice has to be made before.
        inputs = dataclasses.replace(inputs, hf_processor_mm_kwargs=kwargs)
        return super().apply(inputs, timing_ctx)  # type: ignore[misc]

    @property
    def _tokenizer(self) -> Any:
        return self.info.get_tokenizer()

    def _named(self, prompt: Any, images: int, names: Any, question: Any) -> views.Words | None:
        """The names of the images and the question, as given or from the prompt; None if the prompt has too few images."""
        processor: Any = self
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=False)
        ids = torch.tensor(prompt, dtype=torch.int64)
        where = (ids == processor._placeholder).nonzero().flatten().tolist()[:images]
        if len(where) < images:
            return None  # vLLM refuses it
        words = ~torch.isin(ids, torch.tensor(sorted(processor._special_ids)))
        named = views.find_question(self._tokenizer, ids, words, [(column, 1) for column in where])
        if question is not None:
            named = dataclasses.replace(named, question=processor._words_of(QUERY, question))
        if names is None:
            return named
        if not isinstance(names, list) or len(names) != images:
            raise ValueError(
                f"'{NAMES}' must be a list of {images} texts, one for each image, got {reprlib.repr(names)}"
            )
        return dataclasses.replace(named, names=[processor._words_of(NAMES, name) for name in names])

    # Without the choice in the arguments: it is a list for all images, and would make their keys specific to this request.
    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        stays = kwargs.pop(STAYS, None)
        hashes: dict[str, list[str]] = super()._get_mm_hashes(  # type: ignore[misc]
            dataclasses.replace(inputs, hf_processor_mm_kwargs=kwargs)
        )
        if stays is None:
            return hashes
        marks = ("left out", "stays")
        return hashes | {"image": [f"{name}-{marks[stay]}" for name, stay in zip(hashes["image"], stays, strict=True)]}

    # vllm/multimodal/processing/processor.py::BaseMultiModalProcessor._get_cache_missing_processor_kwargs is called with all
    # images, the processor afterwards only with those missing in its cache.
    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Mapping[str, Any]:
        kwargs: Mapping[str, Any] = super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached)  # type: ignore[misc]
        if STAYS not in kwargs:
            return kwargs
        missing = [stay for stay, hit in zip(kwargs[STAYS], mm_is_cached["image"], strict=True) if not hit]
        return {**kwargs, STAYS: missing}

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        data = super()._apply_hf_processor_main(mm_items, hf_kwargs)  # type: ignore[misc]
        if hf_kwargs.get(STAYS):
            data[STAYS] = torch.tensor(hf_kwargs[STAYS])
        return data

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        from vllm.multimodal.inputs import MultiModalFieldConfig

        fields = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)  # type: ignore[misc]
        return {**fields, STAYS: MultiModalFieldConfig.batched("image", keep_on_cpu=True)}

    def _shortened(self, update: Any, number: int, mm_items: Any, out_mm_kwargs: Any) -> Placeholders:
        placeholders: Placeholders = super()._shortened(update, number, mm_items, out_mm_kwargs)  # type: ignore[misc]
        if is_kept(out_mm_kwargs[update.modality][number]):
            return placeholders
        return Placeholders(placeholders.full[:1], positions=placeholders.positions)


def is_kept(item: Mapping[str, Any]) -> bool:
    """Whether a processed image stays; True for methods that do not choose."""
    return STAYS not in item or bool(item[STAYS].data)


def table_of(source: str) -> Tensor:
    """The language model's embedding table `[words, d]`, memory-mapped from a checkpoint's files. UserError if not found."""
    folder = hub.local(source, "model")
    words = {
        name: entry
        for name, entry in models.stored_tensors(folder).items()
        if name.endswith(TABLE) and not name.startswith("mtp.") and entry.spec.dtype in FLOATS
    }
    if len(words) != 1:
        raise UserError(
            f"{folder} has {len(words)} tables of words '*{TABLE}', which choosing among images reads one of"
        )
    (table,) = tensor_files.map_tensors(words).values()
    return table


class ViewsModel:
    """Mixin of a model, put before its other mixins: encodes images that stay, and inserts a token for the others."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        from vllm.tokenizers import cached_tokenizer_from_config

        self._stand_in = views.stand_in(cached_tokenizer_from_config(vllm_config.model_config))

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode images as the model does, except those that are left out."""
        stays = kwargs.pop(STAYS, None)
        parent: Any = super()
        if stays is None or all(kept := [bool(stay) for stay in stays.flatten()]):
            return parent.embed_multimodal(**kwargs)
        encoded = iter(parent.embed_multimodal(**self._of(kwargs, kept)) if any(kept) else ())
        return tuple(next(encoded) if stay else self._left_out() for stay in kept)

    def _of(self, kwargs: dict[str, Any], stays: list[bool]) -> dict[str, Any]:
        """The fields `kwargs` of the images that stay."""
        raise NotImplementedError

    def _left_out(self) -> Tensor:
        """The row that replaces an image, packed with the image's first place. Deepstack adds nothing to it."""
        model: Any = self
        language_model = model.get_language_model()
        device = next(language_model.parameters()).device
        row = embedded(language_model, torch.full((1,), self._stand_in, device=device))
        row = torch.nn.functional.pad(row, (0, getattr(model, "multiscale_dim", 0)))
        return pack(row, torch.zeros(1, DIMS, dtype=torch.int64, device=device), 0)

    def get_mm_lora_token_counts(self, *, modality: str, mm_kwargs: Any, num_mm_embeds: int) -> tuple[int, int | None]:
        """Numbers of tokens in encoder and projector, which never get an image that is left out."""
        counts: tuple[int, int | None] = super().get_mm_lora_token_counts(  # type: ignore[misc]
            modality=modality, mm_kwargs=mm_kwargs, num_mm_embeds=num_mm_embeds
        )
        if mm_kwargs is None or is_kept(mm_kwargs):
            return counts
        return 0, None if counts[1] is None else 0

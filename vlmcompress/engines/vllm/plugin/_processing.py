"""Mixins of vLLM's multimodal processors and processing infos, put before vLLM's classes.

`Counting` is for counts that depend on the image: the processor computes them from pixels, so that the prompt has as many
placeholders. They are passed with the image, as its field `kept_tokens`, to the encoder, which merges to exactly that many
tokens, independent of the pixels' dtype there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import EmbeddingItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdateDetails

from vlmcompress.engines.vllm.plugin._loading import ResumableProcessor
from vlmcompress.engines.vllm.plugin._positions import longest_prompt
from vlmcompress.engines.vllm.plugin._served_reducer import KEEP, UNITS, ServedReducer
from vlmcompress.models import spec_for, tile_grid
from vlmcompress.reduction import methods
from vlmcompress.reduction.hooks.pixels import unit_pixels
from vlmcompress.reduction.methods import Grid, Signals


@dataclasses.dataclass
class Placeholders(PromptUpdateDetails):
    """Placeholders of an image or a video in the prompt, and the number of positions that they take up."""

    positions: int = 0


def without_ours(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A request's processor arguments without the one that only the plugin knows."""
    return {name: value for name, value in arguments.items() if name != KEEP}


class ReducedInfo:
    """Mixin of a `BaseProcessingInfo` with the reducer."""

    @functools.cached_property
    def reducer(self) -> ServedReducer:
        """The reducer of the checkpoint."""
        return ServedReducer.of(self.get_hf_config())  # type: ignore[attr-defined]


class ReducedProcessor(ResumableProcessor):
    """Mixin of a `BaseMultiModalProcessor`: fewer placeholders in the prompt, and cache keys that include the reducer.

    vLLM's key for an image consists of its content, the model and the processor's arguments. That is sufficient within one
    engine, which has one reducer, but not for a store that outlives the engine, as the same folder may later have another
    reducer.
    """

    info: Any

    # vllm/multimodal/parse.py::EmbeddingItems bypass the processor, which could not shorten their placeholders.
    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process as vLLM does. ValueError, which a server answers with status 400, for embeddings in place of images, and
        for a `keep` that a request may not set."""
        if any(isinstance(items, EmbeddingItems) for items in inputs.mm_data_items.values()):
            raise ValueError("this checkpoint reduces visual tokens itself; send images, not embeddings of them")
        kwargs, chosen = dict(inputs.hf_processor_mm_kwargs), self.info.reducer.chosen
        if KEEP in kwargs or chosen.reducer.keep_max is not None:
            # vllm/multimodal/processing/inputs.py::ProcessorInputs.get_mm_hashes hashes these arguments, and all of vLLM's
            # caches go by those hashes: an image has one entry for each share, the checkpoint's own among them.
            kwargs[KEEP] = chosen.requested(kwargs.get(KEEP, chosen.reducer.keep))
        inputs = dataclasses.replace(inputs, hf_processor_mm_kwargs=kwargs)
        return super().apply(inputs, timing_ctx)  # type: ignore[misc]

    # vllm/multimodal/encoder_budget.py::get_mm_max_toks_per_item reserves the memory that these images take.
    def get_dummy_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        """Make vLLM's largest images and videos, with the largest share that a request may set."""
        inputs = super().get_dummy_inputs(seq_len, mm_counts, mm_options)  # type: ignore[misc]
        most = self.info.reducer.chosen.reducer.keep_max
        return inputs if most is None else dataclasses.replace(inputs, hf_processor_mm_kwargs={KEEP: most})

    # vllm/model_executor/models/qwen3_vl.py::Qwen3VLMultiModalProcessor returns only arguments that transformers knows.
    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Mapping[str, Any]:
        kwargs: Mapping[str, Any] = super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached)  # type: ignore[misc]
        ours = inputs.hf_processor_mm_kwargs
        return {**kwargs, KEEP: ours[KEEP]} if KEEP in ours else kwargs

    # vllm/multimodal/processing/processor.py::BaseMultiModalProcessor._apply_hf_processor_main passes its arguments to
    # transformers' processor, which refuses unknown names.
    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        data = super()._apply_hf_processor_main(mm_items, without_ours(hf_kwargs))  # type: ignore[misc]
        if KEEP in hf_kwargs:
            for modality, count in mm_items.get_all_counts().items():
                data[f"{modality}_{KEEP}"] = torch.full((count,), hf_kwargs[KEEP], dtype=torch.float64)
        return data

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        fields = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
        keeps = {name: MultiModalFieldConfig.batched(name, keep_on_cpu=True) for name in ("image", "video")}
        if self.info.reducer.pixels:
            tokens = [sum(map(math.prod, grids)) for grids in self._grids(hf_inputs)]
            fields[UNITS] = MultiModalFieldConfig.flat_from_sizes("image", torch.tensor(tokens), keep_on_cpu=True)
        return fields | {f"{name}_{KEEP}": field for name, field in keeps.items()}

    # vllm/multimodal/processing/processor.py::BaseMultiModalProcessor._postprocess_hf_mm_data is the last step with the pixels
    # of all images before fields are split and placeholders written.
    def _postprocess_hf_mm_data(self, mm_inputs: Any, hf_processor_mm_kwargs: Any, processed_data: Any) -> Any:
        parent: Any = super()
        data = parent._postprocess_hf_mm_data(mm_inputs, hf_processor_mm_kwargs, processed_data)
        if self.info.reducer.pixels and (pixels := data.get("pixel_values")) is not None:
            data[UNITS] = self._kept_units(pixels, [grid for grids in self._grids(data) for grid in grids])
        return data

    def _kept_units(self, pixels: Any, grids: Sequence[Grid]) -> torch.Tensor:
        """Mark the tokens that stay, `[tokens of all images]` bool, by the pixels of images or tiles of these grids."""
        reducer = self.info.reducer.chosen.reducer
        packed = spec_for({"model_type": self.info.get_hf_config().model_type}).images.grid == "thw"
        if not isinstance(pixels, torch.Tensor):  # of one image each
            pixels = (torch.cat if packed else torch.stack)([*map(torch.as_tensor, pixels)])
        parts = unit_pixels(pixels, grids, packed, self.info.get_hf_processor().image_processor)
        signals = [Signals(grid, pixels=values) for grid, values in zip(grids, parts, strict=True)]
        return torch.cat([methods.reduce(reducer, image).target >= 0 for image in signals])

    def _grids(self, inputs: Mapping[str, Any]) -> list[list[Grid]]:
        """The grids of tokens of each image in the processor's output: one, or those of its tiles."""
        raise NotImplementedError

    # vllm/multimodal/processing/processor.py::BaseMultiModalProcessor writes the placeholders of these updates. Can go when
    # vLLM gets token counts per image from the model.
    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        """Make vLLM's updates of the prompt, with placeholders for the kept tokens of each image and video."""
        parent: Any = super()
        updates = parent._get_prompt_updates(mm_items, without_ours(hf_processor_mm_kwargs), out_mm_kwargs)

        def shorter(update: Any) -> Any:
            return lambda number: self._shortened(update, number, mm_items, out_mm_kwargs)

        return [dataclasses.replace(update, replacement=shorter(update)) for update in updates]

    def _shortened(self, update: Any, number: int, mm_items: Any, out_mm_kwargs: Any) -> Placeholders:
        """Shorten vLLM's `update` to the remaining placeholders of item `number` of its modality."""
        raise NotImplementedError

    # vllm/v1/engine/input_processor.py::InputProcessor compares the shortened prompt with the context length; positions, which
    # end like the full prompt's, are only checked here.
    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> tuple[list[int], Any]:
        """Update the prompt as vLLM does. ValueError, answered with status 400, if positions exceed those of the model."""
        tokens, placeholders = super()._maybe_apply_prompt_updates(mm_items, mm_res)  # type: ignore[misc]
        contents = [update.content for items in mm_res.prompt_updates.values() for (update,) in items]
        dropped = sum(placeholder.positions - len(placeholder.full) for placeholder in contents)
        end = len(tokens) + dropped
        if end > (most := longest_prompt(self.info.ctx.model_config)):
            raise ValueError(
                f"the prompt ends at position {end}, counted before images and videos are reduced, and the model knows "
                f"{most}; send fewer images, shorter videos or less text"
            )
        return tokens, placeholders

    # vllm/multimodal/processing/processor.py::BaseMultiModalProcessor._get_mm_hashes uses model id, content and processor
    # arguments; caches that outlive the engine (KV connectors) would mix up reducers at one path.
    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        hashes: dict[str, list[str]] = super()._get_mm_hashes(inputs)  # type: ignore[misc]
        mark = self.info.reducer.fingerprint
        return {modality: [f"{name}-{mark}" for name in names] for modality, names in hashes.items()}


def register_processing(info: type, *processor: type) -> Callable[[Any], Any]:
    """Decorate a reduced model: its processing is that of vLLM's model, with mixins put before vLLM's classes.

    Args:
        info: mixin of the processing info.
        processor: mixins of the processor.
    """

    def register(model: Any) -> Any:
        # vllm/model_executor/models/interfaces.py::SupportsMultiModal._processor_factory is what vLLM registered for its model.
        vllm = model._processor_factory
        return MULTIMODAL_REGISTRY.register_processor(
            type("Processor", (*processor, vllm.processor), {}),
            info=type("Info", (info, vllm.info), {}),
            dummy_inputs=vllm.dummy_inputs,
        )(model)

    return register


FIELD = "kept_tokens"


class CountedInfo:
    """Mixin of a processing info, put before the family's class."""

    # vllm/multimodal/encoder_budget.py::get_mm_max_toks_per_item encodes a blank image to reserve memory if this returns None.
    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int] | None:
        """Return the highest count, as vLLM's blank images may have few tokens."""
        info: Any = self
        if not info.reducer.counter and not info.reducer.pixels:
            return None
        return {"image": info.reducer.count(tile_grid(info.get_hf_config()))}


class Counting:
    """Mixin of a processor with `pixel_values [pictures, 3, height, width]`: computes the count of each picture."""

    info: Any

    # vllm/multimodal/processing/processor.py::BaseMultiModalProcessor._postprocess_hf_mm_data is the last step with the pixels
    # of all images before fields are split and placeholders written.
    def _postprocess_hf_mm_data(self, mm_inputs: Any, hf_processor_mm_kwargs: Any, processed_data: Any) -> Any:
        parent: Any = super()
        data = parent._postprocess_hf_mm_data(mm_inputs, hf_processor_mm_kwargs, processed_data)
        counter, pixels = self.info.reducer.counter, data.get("pixel_values")
        if counter and pixels is not None:
            data[FIELD] = torch.tensor([counter.count(torch.as_tensor(image)) for image in pixels])
        return data

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        parent: Any = super()
        fields = parent._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
        if self.info.reducer.counter is None:
            return fields
        return {**fields, FIELD: self._field(hf_inputs)}

    def _field(self, hf_inputs: Any) -> Any:
        """The field that splits counts by image: one each."""
        # On the CPU: the count is read there (`counts_of`), and `strip_covered_mm_data` leaves it in for positions.
        return MultiModalFieldConfig.batched("image", keep_on_cpu=True)


class CountedProcessor(Counting):
    """Mixin of a processor with one picture per image, put before the family's class."""

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Sequence[Any]:
        if self.info.reducer.counter is None:
            parent: Any = super()
            return parent._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        token = self.info.get_hf_config().image_token_index

        def replacement(number: int) -> list[int]:
            return [token] * int(out_mm_kwargs["image"][number][FIELD].data)

        return [PromptReplacement(modality="image", target=[token], replacement=replacement)]


def counts_of(kwargs: dict[str, Any]) -> list[int] | None:
    """Remove the counts from a model's multimodal arguments and return them; None if there are none."""
    counts = kwargs.pop(FIELD, None)
    return None if counts is None else [int(count) for part in counts for count in torch.as_tensor(part).flatten()]

"""Counts that depend on the image: the processor computes them from pixels, so that the prompt has as many placeholders.

They go with the image, as its field `kept_tokens`, to the encoder, which merges to exactly that many tokens, whatever type
the pixels have by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import PromptReplacement

FIELD = "kept_tokens"


class CountedInfo:
    """Mixin of a processing info, put before the family's class."""

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int] | None:
        """Return the highest count, as the blank images that vLLM would try may have few tokens."""
        own: Any = self
        return {"image": own.reducer.counter.buckets[-1]} if own.reducer.counter else None


class Counting:
    """Mixin of a processor whose pictures are `pixel_values [pictures, 3, height, width]`: counts that of each."""

    info: Any

    def _postprocess_hf_mm_data(self, mm_inputs: Any, hf_processor_mm_kwargs: Any, processed_data: Any) -> Any:
        own: Any = super()
        data = own._postprocess_hf_mm_data(mm_inputs, hf_processor_mm_kwargs, processed_data)
        counter, pixels = self.info.reducer.counter, data.get("pixel_values")
        if counter and pixels is not None:
            data[FIELD] = torch.tensor([counter.count(torch.as_tensor(image)) for image in pixels])
        return data

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        own: Any = super()
        fields = own._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
        if self.info.reducer.counter is None:
            return fields
        return {**fields, FIELD: self._field(hf_inputs)}

    def _field(self, hf_inputs: Any) -> Any:
        """How the counts are shared out among images: one each."""
        return MultiModalFieldConfig.batched("image", keep_on_cpu=True)


class CountedProcessor(Counting):
    """Mixin of a processor whose images are a picture each, put before the family's class."""

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Sequence[Any]:
        if self.info.reducer.counter is None:
            own: Any = super()
            return own._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        token = self.info.get_hf_config().image_token_index

        def replacement(number: int) -> list[int]:
            return [token] * int(out_mm_kwargs["image"][number][FIELD].data)

        return [PromptReplacement(modality="image", target=[token], replacement=replacement)]


def counts_of(kwargs: dict[str, Any]) -> list[int] | None:
    """Take the counts out of a model's multimodal arguments and return them; None where there are none."""
    given = kwargs.pop(FIELD, None)
    return None if given is None else [int(count) for part in given for count in torch.as_tensor(part).flatten()]

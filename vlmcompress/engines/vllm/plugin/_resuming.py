"""Keep the images of requests that vLLM preempts and resumes.

Where the prefix cache covers an image, vLLM 0.32 leaves out of what it sends to the workers all fields of the image but
those that stay on the CPU (`strip_covered_mm_data`). If the request is preempted later and its blocks are evicted, the
image has to be encoded after all, and the runner (the CPU's and the first of the two for GPUs) has only what it was sent at
first: the engine ends with "Encoder cache miss", without a reducer, too. So here every field stays on the CPU, and the
model fetches the pixels itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

PIXELS = "pixel_"  # how the names of fields begin that the encoder computes with


class ResumableProcessor:
    """Mixin of a multimodal processor, put before vLLM's class: every field stays on the CPU."""

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        own: Any = super()
        fields = own._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
        return {name: _on_cpu(config) for name, config in fields.items()}


class ResumableModel:
    """Mixin of a model, put before vLLM's class: fetches the pixels itself."""

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode as the model does, with the pixels moved to its device."""
        own: Any = super()
        device = next(self.parameters()).device  # type: ignore[attr-defined]
        pixels = {name: value for name, value in kwargs.items() if name.startswith(PIXELS)}
        return own.embed_multimodal(**kwargs | tree_map_only(torch.Tensor, lambda part: part.to(device), pixels))


def _on_cpu(config: Any) -> Any:
    return dataclasses.replace(config, field=dataclasses.replace(config.field, keep_on_cpu=True))

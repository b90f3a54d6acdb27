"""Capture a reducer's decisions on the images of one prompt by running the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from vlmcompress.errors import UserError
from vlmcompress.hf_hooks import KeptWhole, attach, refusal
from vlmcompress.models import VLM, Layout
from vlmcompress.recipe.reducer import ReducerChoice
from vlmcompress.reducers import Reduction


@torch.no_grad()
def decide(vlm: VLM, inputs: dict[str, Tensor], layouts: Sequence[Layout], chosen: ReducerChoice) -> list[Reduction]:
    """Decide the reduction of each image.

    Args:
        inputs: inputs of one prompt, from the model's processor.
        layouts: layouts of its images, in the order of the prompt.
        chosen: the reducer, which is attached while the prompt runs.
    """
    if reason := refusal(vlm.spec, chosen.method):
        raise UserError(f"--reduce {chosen}: {reason}")
    with warnings.catch_warnings(), attach(vlm, chosen) as attached:
        warnings.simplefilter("ignore", KeptWhole)  # `cost.too_small` tells it of each image
        vlm.model(**_typed(vlm, inputs), logits_to_keep=1)
    parts = attached.images()  # or tiles, of which an image has several
    found = []
    for layout in layouts:
        own: list[Reduction] = []
        while parts and sum(len(part.target) for part in own) < layout.tokens:
            own.append(parts.pop(0))
        found.append(Reduction.concat(own))
    if parts or [len(one.target) for one in found] != [layout.tokens for layout in layouts]:
        raise ValueError("the reducer saw other images than the processor made")
    return found


def _typed(vlm: VLM, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move inputs to the model's device, in its type."""
    device, dtype = vlm.model.device, vlm.model.dtype
    return {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in inputs.items()}

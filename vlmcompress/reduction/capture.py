"""What a reducer does with the images of one prompt, seen on the model itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vlmcompress import reducers
from vlmcompress.chosen import Chosen
from vlmcompress.errors import UserError
from vlmcompress.models import VLM, Layout, ModelSpec
from vlmcompress.reducers import Reduction, Signals
from vlmcompress.reduction import attach, refusal


def refused(spec: ModelSpec, chosen: Chosen) -> str | None:
    """Why this reducer cannot be looked at on a model of this family; None when it can."""
    if "pixels" in chosen.module.NEEDS:
        if spec.visual_grid == "thw":
            return None
        return f"'{chosen.method}' leaves out patches, and the encoder of {spec.family} takes whole pictures; use a Qwen model"
    return refusal(spec, chosen.method)


@torch.no_grad()
def decide(vlm: VLM, inputs: dict[str, Tensor], layouts: Sequence[Layout], chosen: Chosen) -> list[Reduction]:
    """What becomes of the tokens of each image.

    Args:
        inputs: of one prompt, from the model's processor.
        layouts: of its images, in the order of the prompt.
        chosen: the reducer. It is attached while the prompt runs, except one that looks at pixels alone.
    """
    if reason := refused(vlm.spec, chosen):
        raise UserError(f"--reduce {chosen}: {reason}")
    if "pixels" in chosen.module.NEEDS:
        return [reducers.reduce(chosen.module, one, chosen.options) for one in pixels(vlm, inputs)]
    with attach(vlm, chosen.method, chosen.options) as attached:
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


def pixels(vlm: VLM, inputs: dict[str, Tensor]) -> list[Signals]:
    """Of each image the pixels of its tokens, in levels 0 to 255; of families whose processor lays out patches."""
    images_of, found, start = vlm.processor.image_processor, [], 0
    mean, std = (torch.tensor(values)[:, None] for values in (images_of.image_mean, images_of.image_std))
    merge = images_of.merge_size
    for t, h, w in inputs["image_grid_thw"].tolist():
        patches = inputs["pixel_values"][start : start + t * h * w].float()  # those of a token stand together
        start += t * h * w
        levels = (patches.reshape(t * h * w, 3, -1) * std + mean) * 255
        grid = (t, h // merge, w // merge)
        found.append(Signals(grid, pixels=levels.round().reshape(math.prod(grid), -1)))
    return found


def _typed(vlm: VLM, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs where the model is, in its type."""
    device, dtype = vlm.model.device, vlm.model.dtype
    return {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in inputs.items()}

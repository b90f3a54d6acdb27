"""LLaVA-OneVision: SigLIP tower on tiles (anyres), two-layer projector, Qwen2 decoder."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from vlmcompress.models._images import square_patches
from vlmcompress.models.families import llava_next


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of LLaVA-OneVision's processor."""
    settings = {name: getattr(config, name) for name in ("vision_feature_select_strategy", "vision_aspect_ratio")}
    return {"num_image_tokens": square_patches(config.vision_config), **settings}


def video(processor: Any, frames: int, width: int, height: int) -> tuple[int, int, int]:
    """Grid of a video: frames of one tile each, whose tokens are pooled 2 x 2. A newline follows the last one."""
    side = math.ceil(math.isqrt(int(processor.num_image_tokens)) / 2)
    return frames, side, side


SPEC = replace(
    llava_next.SPEC,
    family="llava-onevision",
    model_types=("llava_onevision",),
    tower=llava_next.SPEC.tower,
    images=replace(llava_next.SPEC.images, placeholders=placeholders, video=video),
)

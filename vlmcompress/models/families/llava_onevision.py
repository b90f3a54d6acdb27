"""LLaVA-OneVision: SigLIP tower on tiles (anyres), two-layer projector, Qwen2 decoder."""

from __future__ import annotations

import math
from typing import Any

from vlmcompress.models._images import square_patches
from vlmcompress.models._spec import CLIP, LLAMA, LLAVA_ENGINE, LLAVA_MAPPER, ModelSpec
from vlmcompress.models.families import llava_next


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of LLaVA-OneVision's processor."""
    settings = {name: getattr(config, name) for name in ("vision_feature_select_strategy", "vision_aspect_ratio")}
    return {"num_image_tokens": square_patches(config.vision_config), **settings}


def video(processor: Any, frames: int, width: int, height: int) -> tuple[int, int, int]:
    """Grid of a video: frames of one tile each, whose tokens are pooled 2 x 2. A newline follows the last one."""
    side = math.ceil(math.isqrt(int(processor.num_image_tokens)) / 2)
    return frames, side, side


SPEC = ModelSpec(
    family="llava-onevision",
    model_types=("llava_onevision",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    image_token="image_token_index",
    newlines=("model.image_newline",),
    layout=llava_next.layout,
    placeholders=placeholders,
    image_processor=llava_next.image_processor,
    sizes=llava_next.sizes,
    video=video,
    visual_grid="anyres",
    vision_units="resized",
    engine_prefixes=LLAVA_ENGINE,
    engine_mapper=LLAVA_MAPPER,
    hub_prefixes=LLAVA_ENGINE,
)

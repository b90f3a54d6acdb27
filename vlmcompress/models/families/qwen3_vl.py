"""Qwen3-VL: ViT whose early features enter the first decoder layers (deepstack), Qwen3 decoder, interleaved M-RoPE.

The deepstack mergers are projectors: they are not quantized, even if the tower's blocks are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlmcompress.models._spec import (
    LLAMA,
    QWEN3_TOWER,
    QWEN_ENGINE,
    EngineNames,
    Engines,
    Images,
    MlxClass,
    ModelSpec,
    Tower,
)
from vlmcompress.models.families import qwen2_vl


def video(processor: Any, frames: int, width: int, height: int) -> tuple[int, int, int]:
    """Grid of a video: pairs of frames, resized so that all frames together have a limited number of pixels."""
    from transformers.models.qwen3_vl import video_processing_qwen3_vl

    settings = qwen2_vl.video_settings(processor, video_processing_qwen3_vl.Qwen3VLVideoProcessor)
    unit, limits = settings.patch_size * settings.merge_size, settings.size
    sides = video_processing_qwen3_vl.smart_resize(
        num_frames=frames, height=height, width=width, factor=unit, min_pixels=limits["shortest_edge"],
        max_pixels=limits["longest_edge"], temporal_factor=settings.temporal_patch_size,
    )  # fmt: skip
    return math.ceil(frames / 2), sides[0] // unit, sides[1] // unit


def levels(config: Mapping[str, Any]) -> int:
    """The embedding, and DeepStack's of some blocks of the tower."""
    return 1 + len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())


SPEC = ModelSpec(
    family="qwen3-vl",
    model_types=("qwen3_vl",),
    groups=LLAMA,
    vision=("model.visual",),
    projector=("model.visual.merger", "model.visual.deepstack_merger_list"),
    vision_layers="model.visual.blocks",
    vision_groups=QWEN3_TOWER,
    layout=qwen2_vl.layout,
    names=EngineNames(prefixes=QWEN_ENGINE, mapper=QWEN_ENGINE),
    tower=Tower(blocks="Qwen3"),
    images=Images(
        placeholders=qwen2_vl.placeholders,
        processor=qwen2_vl.image_processor,
        sizes=qwen2_vl.sizes,
        video=video,
        token_side=qwen2_vl.SPEC.images.token_side,
        positions="mrope",
        grid="thw",
        levels=levels,
    ),
    engine=Engines(tool_calls=("hermes", "<tool_call>"), mlx=MlxClass(tower_type=True, fewer_tokens=True)),
)

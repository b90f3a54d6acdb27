"""Qwen2-VL: full-attention ViT with a plain MLP, merger, Qwen2 decoder, M-RoPE positions."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

from vlmcompress.models._images import ImageSetting, Layout, Piece
from vlmcompress.models._spec import (
    LLAMA,
    QWEN2_HUB,
    QWEN2_MAPPER,
    QWEN_ENGINE,
    EngineNames,
    Engines,
    Images,
    LinearGroup,
    MlxClass,
    ModelSpec,
)


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of the Qwen family: one grid in the image's own shape."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    images_of = processor.image_processor
    unit = images_of.patch_size * images_of.merge_size
    low, high = images_of.size["shortest_edge"], images_of.size["longest_edge"]
    rows, columns = (side // unit for side in smart_resize(height, width, unit, min_pixels=low, max_pixels=high))
    return Layout((Piece.whole(rows, columns, width, height),))


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of Qwen's and GLM's processors."""
    vision = config.vision_config
    return {"image_processor.patch_size": vision.patch_size, "image_processor.merge_size": vision.spatial_merge_size}


def sizes(processor: Any, frames: int = 1) -> list[ImageSetting]:
    """Settings of the Qwen family: the most pixels of an image, summed over its `frames`."""
    images_of = processor.image_processor
    unit = (images_of.patch_size * images_of.merge_size) ** 2 * frames
    low, high = images_of.size["shortest_edge"], images_of.size["longest_edge"]
    least, most = max(1, -(-low // unit)), high // unit
    return [
        ImageSetting(tokens, {"size": {"shortest_edge": low, "longest_edge": tokens * unit}})
        for tokens in range(least, most)
    ] + [ImageSetting(most)]


def image_processor(config: Any) -> Any:
    """The default processor of transformers, which limits the size of an image."""
    from transformers import Qwen2VLImageProcessor

    vision = config.vision_config
    return Qwen2VLImageProcessor(patch_size=vision.patch_size, merge_size=vision.spatial_merge_size)


def video(processor: Any, frames: int, width: int, height: int) -> tuple[int, int, int]:
    """Grid of a video: pairs of frames, each frame resized on its own."""
    from transformers.models.qwen2_vl import image_processing_qwen2_vl, video_processing_qwen2_vl

    settings = video_settings(processor, video_processing_qwen2_vl.Qwen2VLVideoProcessor)
    unit, limits = settings.patch_size * settings.merge_size, settings.size
    sides = image_processing_qwen2_vl.smart_resize(
        height, width, unit, min_pixels=limits["shortest_edge"], max_pixels=limits["longest_edge"]
    )
    return math.ceil(frames / 2), sides[0] // unit, sides[1] // unit


def video_settings(processor: Any, kind: Any) -> Any:
    """The processor's video processor or, without one, an instance of `kind` with the same patch sizes."""
    if (settings := getattr(processor, "video_processor", None)) is not None:
        return settings
    images_of = processor.image_processor
    return kind(patch_size=images_of.patch_size, merge_size=images_of.merge_size)


SPEC = ModelSpec(
    family="qwen2-vl",
    model_types=("qwen2_vl",),
    groups=LLAMA,
    vision=("model.visual",),
    projector=("model.visual.merger",),
    vision_layers="model.visual.blocks",
    vision_groups=(
        LinearGroup("qkv", ("attn.qkv",), ("norm1",)),
        LinearGroup("o", ("attn.proj",)),
        LinearGroup("fc1", ("mlp.fc1",), ("norm2",)),
        LinearGroup("fc2", ("mlp.fc2",)),
    ),
    layout=layout,
    names=EngineNames(prefixes=QWEN_ENGINE, mapper=QWEN2_MAPPER, hub=QWEN2_HUB),
    images=Images(
        placeholders=placeholders,
        processor=image_processor,
        sizes=sizes,
        recommended=1280,  # "such as a token range of 256-1280": cards of Qwen2-VL-7B-Instruct, Qwen2.5-VL-7B-Instruct
        video=video,
        token_side=attrgetter("vision_config.spatial_merge_size"),
        positions="mrope",
        grid="thw",
    ),
    engine=Engines(mlx=MlxClass(tower_type=True, flat=True, fewer_tokens=True)),
)

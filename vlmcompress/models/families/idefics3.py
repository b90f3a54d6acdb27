"""Idefics3 and SmolVLM: SigLIP-like tower on tiles, pixel shuffle and one linear connector, Llama decoder."""

from __future__ import annotations

import math
from typing import Any

from vlmcompress.models._images import ImageSetting, Layout, square_patches
from vlmcompress.models._spec import CLIP, LLAMA, Engines, Images, MlxClass, ModelSpec, Tower


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Idefics3 and SmolVLM: tiles of the image scaled up to whole ones, then the whole image."""
    from transformers.models.idefics3 import image_processing_idefics3

    source: Any = image_processing_idefics3
    images_of = processor.image_processor
    side, across, down = images_of.max_image_size["longest_edge"], 1, 1
    if images_of.do_image_splitting:
        if images_of.do_resize:
            size = source._resize_output_size_rescale_to_max_len(height, width, max_len=images_of.size["longest_edge"])
            high, wide = source._resize_output_size_scale_below_upper_bound(*size, max_len=source.MAX_IMAGE_SIZE)
        else:
            high, wide = height, width
        if wide >= high:
            across = math.ceil(wide / side)
            down = math.ceil(int(across * side / (wide / high)) / side)
        else:
            down = math.ceil(high / side)
            across = math.ceil(int(down * side * (wide / high)) / side)
    return Layout.of_tiles(math.isqrt(processor.image_seq_len), across, down, width, height)


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of Idefics3's and SmolVLM's processors."""
    return {"image_seq_len": int(square_patches(config.vision_config) / config.scale_factor**2)}


def sizes(processor: Any) -> list[ImageSetting]:
    """Settings of Idefics3 and SmolVLM: the longer side of an image, in tiles."""
    images_of, each = processor.image_processor, processor.image_seq_len
    if not images_of.do_image_splitting or not images_of.do_resize:
        return [ImageSetting(each)]
    side = images_of.max_image_size["longest_edge"]
    now = images_of.size["longest_edge"]
    counts = range(1, math.ceil(now / side) + 1)
    settings = [
        ImageSetting(each * (count**2 + (count > 1)), {"size": {"longest_edge": count * side}}) for count in counts
    ]
    return [*settings[:-1], ImageSetting(settings[-1].tokens)]


def token_side(config: Any) -> int:
    """Pixel shuffle."""
    return int(config.scale_factor)


SPEC = ModelSpec(
    family="idefics3",
    model_types=("idefics3", "smolvlm"),
    groups=LLAMA,
    vision=("model.vision_model",),
    projector=("model.connector",),
    vision_layers="model.vision_model.encoder.layers",
    vision_groups=CLIP,
    layout=layout,
    layers="model.text_model.layers",
    tower=Tower(joint=("self_attn", "layer_norm2"), merging=(("idefics3_vision", "full"), ("smolvlm_vision", "full"))),
    images=Images(placeholders=placeholders, sizes=sizes, token_side=token_side, grid="tiles"),
    engine=Engines(mlx=MlxClass(head="own", fewer_tokens=True)),
)

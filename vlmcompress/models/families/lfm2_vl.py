"""LFM2-VL and LFM2.5-VL: SigLIP2 tower at native resolution, two-layer projector, LFM2 decoder.

Decoder blocks are of two kinds, gated short convolution (`conv`) or grouped-query attention (`self_attn`), each
followed by a gated MLP (`w1` gate, `w3` up, `w2` down). A block has only the groups of its own kind.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

from vlmcompress.models._images import ImageSetting, Layout, Piece
from vlmcompress.models._spec import (
    CLIP,
    LLAVA_ENGINE,
    LLAVA_MAPPER,
    EngineNames,
    Engines,
    Images,
    LinearGroup,
    ModelSpec,
)


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of LFM2-VL: one grid in the image's own shape, preceded by tiles if the image is large."""
    images_of = processor.image_processor
    unit, factor = images_of.encoder_patch_size, images_of.downsample_factor
    limits = {"max_image_tokens": images_of.max_image_tokens, "encoder_patch_size": unit, "downsample_factor": factor}
    across = down = 1
    large = images_of._is_image_too_large(
        height=height, width=width, max_pixels_tolerance=images_of.max_pixels_tolerance, **limits
    )
    if large and images_of.do_image_splitting and not images_of.min_tiles == images_of.max_tiles == 1:
        across, down, *_ = images_of._get_grid_layout(
            height, width, images_of.min_tiles, images_of.max_tiles, images_of.tile_size
        )
    wide, high = images_of.smart_resize(
        height=height, width=width, min_image_tokens=images_of.min_image_tokens, **limits
    )
    columns, rows = (math.ceil(side // unit / factor) for side in (wide, high))
    whole = Piece.whole(rows, columns, width, height)
    n = math.ceil(images_of.tile_size // unit / factor)
    pieces = Layout.of_tiles(n, across, down, width, height).pieces[:-1]
    return Layout((*pieces, whole) if images_of.use_thumbnail or not pieces else pieces)


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of LFM2-VL's processor."""
    patch = config.vision_config.patch_size
    return {
        "image_processor.encoder_patch_size": patch,
        "image_processor.downsample_factor": config.downsample_factor,
    }


def sizes(processor: Any) -> list[ImageSetting]:
    """Settings of LFM2-VL: the most tiles of a large image, and below two tiles the most tokens of the whole image."""
    images_of = processor.image_processor
    low, high = images_of.min_image_tokens, images_of.max_image_tokens
    whole = [
        ImageSetting(tokens, {"do_image_splitting": False, "max_image_tokens": tokens}) for tokens in range(low, high)
    ]
    if not images_of.do_image_splitting or images_of.max_tiles == 1:
        return [*whole, ImageSetting(high)]
    each = math.ceil(images_of.tile_size // images_of.encoder_patch_size / images_of.downsample_factor) ** 2
    besides = high if images_of.use_thumbnail else 0
    cut = [
        ImageSetting(max(count * each + besides, high), {"max_tiles": count})
        for count in range(max(2, images_of.min_tiles), images_of.max_tiles)
    ]
    last = ImageSetting(images_of.max_tiles * each + besides)
    return [*whole, ImageSetting(high, {"do_image_splitting": False}), *cut, last]


SPEC = ModelSpec(
    family="lfm2-vl",
    model_types=("lfm2_vl",),
    groups=(
        LinearGroup("conv_in", ("conv.in_proj",), ("operator_norm",)),
        LinearGroup("conv_out", ("conv.out_proj",)),
        LinearGroup(
            "qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("operator_norm",), fused=True
        ),
        LinearGroup("o", ("self_attn.out_proj",), ("self_attn.v_proj",), "linear"),
        LinearGroup("gate_up", ("feed_forward.w1", "feed_forward.w3"), ("ffn_norm",), fused=True),
        LinearGroup("down", ("feed_forward.w2",), ("feed_forward.w3",), "linear"),
    ),
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    layout=layout,
    norm="embedding_norm",
    inner=("conv.conv", "self_attn.q_layernorm", "self_attn.k_layernorm"),
    mixed_blocks="short convolutions",
    names=EngineNames(
        prefixes=LLAVA_ENGINE,
        mapper=LLAVA_MAPPER,
        parts=(("conv", "short_conv"),),
        hub=(("model.vision_tower", "model.vision_tower.vision_model"),),
    ),
    images=Images(placeholders=placeholders, sizes=sizes, token_side=attrgetter("downsample_factor"), grid="shapes"),
    engine=Engines(head_shares=True, kv_scales=False, tool_calls=("lfm2", "<|tool_list_start|>")),
)

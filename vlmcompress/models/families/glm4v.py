"""GLM-4.1V and GLM-4.6V-Flash: a tower with a convolution and a merger after it, GLM-4 decoder, M-RoPE positions.

A block has four norms: attention reads `input_layernorm`, the MLP `post_attention_layernorm`; `post_self_attn_layernorm` and
`post_mlp_layernorm` act on a branch's output. Gate and up are one layer, `gate_up_proj`, of whose output only a half could be
scaled, so `down_proj` has nothing to smooth into.
"""

from __future__ import annotations

from typing import Any

from vlmcompress.models._images import ImageSetting, Layout, Piece
from vlmcompress.models._spec import (
    ATTENTION_OUT,
    QKV,
    QWEN_ENGINE,
    EngineNames,
    Engines,
    Images,
    LinearGroup,
    ModelSpec,
)
from vlmcompress.models.families import qwen2_vl


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of GLM-V: one grid in the image's own shape, whose limits count an image as a video of several frames."""
    from transformers.models.glm4v.image_processing_glm4v import smart_resize

    images_of = processor.image_processor
    unit, frames = images_of.patch_size * images_of.merge_size, images_of.temporal_patch_size
    low, high = images_of.size["shortest_edge"], images_of.size["longest_edge"]
    sides = smart_resize(frames, height, width, frames, unit, min_pixels=low, max_pixels=high)
    return Layout((Piece(sides[0] // unit, sides[1] // unit, (0.0, 0.0, float(width), float(height))),))


def sizes(processor: Any) -> list[ImageSetting]:
    """Settings of GLM-V: the most pixels of an image, which counts as a video of several frames."""
    return qwen2_vl.sizes(processor, processor.image_processor.temporal_patch_size)


SPEC = ModelSpec(
    family="glm4v",
    model_types=("glm4v",),
    groups=(
        QKV,
        ATTENTION_OUT,
        LinearGroup("gate_up", ("mlp.gate_up_proj",), ("post_attention_layernorm",)),
        LinearGroup("down", ("mlp.down_proj",)),
    ),
    vision=("model.visual",),
    projector=("model.visual.merger",),
    vision_layers="model.visual.blocks",
    vision_groups=(
        LinearGroup("qkv", ("attn.qkv",), ("norm1",)),
        LinearGroup("o", ("attn.proj",)),
        LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), ("norm2",), fused=True),
        LinearGroup("down", ("mlp.down_proj",), ("mlp.up_proj",), "linear"),
    ),
    layout=layout,
    names=EngineNames(prefixes=QWEN_ENGINE, mapper=QWEN_ENGINE),
    images=Images(
        placeholders=qwen2_vl.placeholders,
        sizes=sizes,
        token_side=qwen2_vl.SPEC.images.token_side,
        positions="mrope",
        grid="thw",
    ),
    engine=Engines(tool_calls=("glm45", "<arg_key>")),
)

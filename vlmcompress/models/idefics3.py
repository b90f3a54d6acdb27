"""Idefics3 and SmolVLM: SigLIP-like tower on tiles, pixel shuffle and one linear connector, Llama decoder."""

from __future__ import annotations

from vlmcompress.models._blocks import CLIP, LLAMA
from vlmcompress.models._layout import split
from vlmcompress.models._sizes import tile_edges
from vlmcompress.models._spec import ModelSpec

SPEC = ModelSpec(
    family="idefics3",
    model_types=("idefics3", "smolvlm"),
    layers="model.text_model.layers",
    groups=LLAMA,
    vision=("model.vision_model",),
    projector=("model.connector",),
    vision_layers="model.vision_model.encoder.layers",
    vision_groups=CLIP,
    image_token="image_token_id",
    layout=split,
    sizes=tile_edges,
    visual_grid="tiles",
    vision_joint=("self_attn", "layer_norm2"),
)

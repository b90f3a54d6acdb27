"""Idefics3 and SmolVLM: SigLIP-like tower on tiles, pixel shuffle and one linear connector, Llama decoder."""

from __future__ import annotations

from vlmcompress.models._images import split, tile_edges
from vlmcompress.models._placeholders import scaled
from vlmcompress.models._spec import CLIP, LLAMA, ModelSpec

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
    placeholders=scaled,
    sizes=tile_edges,
    visual_grid="tiles",
    vision_joint=("self_attn", "layer_norm2"),
)

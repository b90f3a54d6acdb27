"""Qwen2-VL: full-attention ViT with a plain MLP, merger, Qwen2 decoder, M-RoPE positions."""

from __future__ import annotations

from vlmcompress.models._images import native, pixels
from vlmcompress.models._placeholders import patch_grid
from vlmcompress.models._spec import LLAMA, QWEN2_HUB, QWEN2_MAPPER, QWEN_ENGINE, LinearGroup, ModelSpec

SPEC = ModelSpec(
    family="qwen2-vl",
    model_types=("qwen2_vl",),
    layers="model.language_model.layers",
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
    image_token="image_token_id",
    layout=native,
    placeholders=patch_grid,
    sizes=pixels,
    positions="mrope",
    visual_grid="thw",
    engine_prefixes=QWEN_ENGINE,
    engine_mapper=QWEN2_MAPPER,
    hub_prefixes=QWEN2_HUB,
)

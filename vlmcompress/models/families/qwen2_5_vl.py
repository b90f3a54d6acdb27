"""Qwen2.5-VL: window-attention ViT with a gated MLP, merger, Qwen2 decoder, M-RoPE positions."""

from __future__ import annotations

from vlmcompress.models._spec import LLAMA, QWEN2_HUB, QWEN2_MAPPER, QWEN_ENGINE, LinearGroup, MlxClass, ModelSpec
from vlmcompress.models.families import qwen2_vl

SPEC = ModelSpec(
    family="qwen2-5-vl",
    model_types=("qwen2_5_vl",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.visual",),
    projector=("model.visual.merger",),
    vision_layers="model.visual.blocks",
    vision_groups=(
        LinearGroup("qkv", ("attn.qkv",), ("norm1",)),
        LinearGroup("o", ("attn.proj",)),
        LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), ("norm2",), fused=True),
        LinearGroup("down", ("mlp.down_proj",), ("mlp.up_proj",), "linear"),
    ),
    vision_attention="attn",
    image_token="image_token_id",
    layout=qwen2_vl.layout,
    placeholders=qwen2_vl.placeholders,
    image_processor=qwen2_vl.image_processor,
    sizes=qwen2_vl.sizes,
    video=qwen2_vl.video,
    token_side=qwen2_vl.SPEC.token_side,
    positions="mrope",
    visual_grid="thw",
    engine_prefixes=QWEN_ENGINE,
    engine_mapper=QWEN2_MAPPER,
    hub_prefixes=QWEN2_HUB,
    tool_calls=("hermes", "<tool_call>"),
    mlx=MlxClass(tower_type=True, flat=True, fewer_tokens=True),
)

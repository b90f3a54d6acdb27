"""Qwen2.5-VL: window-attention ViT with a gated MLP, merger, Qwen2 decoder, M-RoPE positions."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import LinearGroup
from vlmcompress.models.families import qwen2_vl

SPEC = replace(
    qwen2_vl.SPEC,
    family="qwen2-5-vl",
    model_types=("qwen2_5_vl",),
    vision_groups=(
        LinearGroup("qkv", ("attn.qkv",), ("norm1",)),
        LinearGroup("o", ("attn.proj",)),
        LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), ("norm2",), fused=True),
        LinearGroup("down", ("mlp.down_proj",), ("mlp.up_proj",), "linear"),
    ),
    engine=replace(qwen2_vl.SPEC.engine, tool_calls=("hermes", "<tool_call>")),
)

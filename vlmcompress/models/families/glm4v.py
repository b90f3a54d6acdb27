"""GLM-4.1V and GLM-4.6V-Flash: a tower with a convolution and a merger behind it, GLM-4 decoder, M-RoPE positions.

A block has four norms: attention reads `input_layernorm`, the MLP `post_attention_layernorm`; `post_self_attn_layernorm` and
`post_mlp_layernorm` act on a branch's output. Gate and up are one layer, `gate_up_proj`, of whose output only a half could be
scaled, so `down_proj` has nothing to smooth into.
"""

from __future__ import annotations

from vlmcompress.models._images import film_pixels, filmed
from vlmcompress.models._placeholders import patch_grid
from vlmcompress.models._spec import ATTENTION_OUT, QKV, QWEN_ENGINE, LinearGroup, ModelSpec

SPEC = ModelSpec(
    family="glm4v",
    model_types=("glm4v",),
    layers="model.language_model.layers",
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
    image_token="image_token_id",
    layout=filmed,
    placeholders=patch_grid,
    sizes=film_pixels,
    positions="mrope",
    engine_prefixes=QWEN_ENGINE,
    engine_mapper=QWEN_ENGINE,
    tool_calls=("glm45", "<arg_key>"),
)

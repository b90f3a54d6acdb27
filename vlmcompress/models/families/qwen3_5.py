"""Qwen3.5, 3.6 and 3.8, dense: the tower of Qwen3-VL without deepstack, a decoder of Gated DeltaNet and attention.

Three of four blocks mix tokens by a Gated DeltaNet, a linear attention with a recurrent state; each fourth by attention whose
`q_proj` holds an output gate as well, head by head. The decoder's norms compute `x * (1 + weight)`.
"""

from __future__ import annotations

from vlmcompress.models._spec import GATED_DELTA_NET, LLAMA, MTP, QWEN3_TOWER, QWEN_ENGINE, MlxClass, ModelSpec
from vlmcompress.models.families import qwen2_vl, qwen3_vl

SPEC = ModelSpec(
    family="qwen3-5",
    model_types=("qwen3_5",),
    layers="model.language_model.layers",
    groups=(*GATED_DELTA_NET, *LLAMA),
    vision=("model.visual",),
    projector=("model.visual.merger",),
    vision_layers="model.visual.blocks",
    vision_groups=QWEN3_TOWER,
    vision_attention="attn",
    image_token="image_token_id",
    layout=qwen2_vl.layout,
    placeholders=qwen2_vl.placeholders,
    image_processor=qwen2_vl.image_processor,
    sizes=qwen2_vl.sizes,
    video=qwen3_vl.video,
    token_side=qwen2_vl.SPEC.token_side,
    positions="mrope",
    visual_grid="thw",
    float32=("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm"),
    mixed_blocks="Gated DeltaNet, which keeps a recurrent state",
    norm_offset=1.0,
    embedding_whole=True,
    draft=MTP,
    engine_prefixes=QWEN_ENGINE,
    engine_mapper=QWEN_ENGINE,
    tool_calls=("qwen3_coder", "<function="),
    mlx=MlxClass(full_attention="full_attention_interval", tower_type=True, fewer_tokens=True),
)

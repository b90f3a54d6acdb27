"""Qwen3.5, 3.6 and 3.8, dense: the tower of Qwen3-VL without deepstack, a decoder of Gated DeltaNet and attention.

Three of four blocks mix tokens by a Gated DeltaNet, a linear attention with a recurrent state; each fourth by attention whose
`q_proj` holds an output gate as well, head by head. The decoder's norms compute `x * (1 + weight)`.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import GATED_DELTA_NET, LLAMA, MTP, MlxClass
from vlmcompress.models.families import qwen3_vl

SPEC = replace(
    qwen3_vl.SPEC,
    family="qwen3-5",
    model_types=("qwen3_5",),
    groups=(*GATED_DELTA_NET, *LLAMA),
    projector=("model.visual.merger",),
    float32=("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm"),
    mixed_blocks="Gated DeltaNet, which keeps a recurrent state",
    norm_offset=1.0,
    mtp=MTP,
    tower=replace(qwen3_vl.SPEC.tower, blocks=None),
    images=replace(qwen3_vl.SPEC.images, levels=None),
    engine=replace(
        qwen3_vl.SPEC.engine,
        embedding_whole=True,
        tool_calls=("qwen3_coder", "<function="),
        mlx=MlxClass(full_attention="full_attention_interval", tower_type=True, fewer_tokens=True),
    ),
)

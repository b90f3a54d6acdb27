"""Qwen3.5, 3.6 and 3.8 with a mixture of experts: the dense model with experts behind a router in every block.

Beside them each block has one shared expert, whose output is scaled by `shared_expert_gate`, a layer of one output that stays
in 16 bits as the router does. The norm before all of these takes no scale in: it feeds the router and every expert, each of
which would want a scale of its own. Published checkpoints hold the experts of a block as two tensors, `[experts, out, in]`;
those in FP8 have them one by one.
"""

from __future__ import annotations

from vlmcompress.models._blocks import (
    ATTENTION_OUT,
    EXPERTS,
    GATED_DELTA_NET,
    MTP,
    QKV,
    QWEN3_TOWER,
    QWEN_ENGINE,
    SHARED_EXPERT,
)
from vlmcompress.models._layout import native
from vlmcompress.models._spec import ModelSpec

SPEC = ModelSpec(
    family="qwen3-5-moe",
    model_types=("qwen3_5_moe",),
    layers="model.language_model.layers",
    experts="mlp.experts",
    router="mlp.gate",
    groups=(*GATED_DELTA_NET, QKV, ATTENTION_OUT, *SHARED_EXPERT, *EXPERTS),
    vision=("model.visual",),
    projector=("model.visual.merger",),
    vision_layers="model.visual.blocks",
    vision_groups=QWEN3_TOWER,
    vision_attention="attn",
    image_token="image_token_id",
    layout=native,
    positions="mrope",
    visual_grid="thw",
    mixed_blocks="Gated DeltaNet, which keeps a recurrent state",
    norm_offset=1.0,
    engine_prefixes=QWEN_ENGINE,
    engine_mapper=QWEN_ENGINE,
    draft=MTP,
)

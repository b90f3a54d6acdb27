"""Gemma 3: SigLIP tower, one-matrix projector, Gemma decoder.

Its norms compute `x * (1 + weight)`, and each block has four of them: the MLP reads `pre_feedforward_layernorm`, while
`post_attention_layernorm` and `post_feedforward_layernorm` act on a branch's output and can absorb nothing.
"""

from __future__ import annotations

from vlmcompress.models._images import pooled
from vlmcompress.models._placeholders import pooled_tokens
from vlmcompress.models._spec import (
    ATTENTION_OUT,
    CLIP,
    DOWN,
    LLAVA_ENGINE,
    LLAVA_MAPPER,
    QKV,
    LinearGroup,
    ModelSpec,
)

SPEC = ModelSpec(
    family="gemma3",
    model_types=("gemma3",),
    layers="model.language_model.layers",
    groups=(
        QKV,
        ATTENTION_OUT,
        LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), ("pre_feedforward_layernorm",), fused=True),
        DOWN,
    ),
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    image_token="image_token_index",
    layout=pooled,
    placeholders=pooled_tokens,
    visual_grid="tiles",
    vision_joint=("self_attn", "layer_norm2"),
    mixed_blocks="attention in windows, and both ways within an image",
    norm_offset=1.0,
    engine_prefixes=LLAVA_ENGINE,
    engine_mapper=LLAVA_MAPPER,
    hub_prefixes=LLAVA_ENGINE,
)

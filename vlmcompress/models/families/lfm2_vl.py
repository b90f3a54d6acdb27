"""LFM2-VL and LFM2.5-VL: SigLIP2 tower at native resolution, two-layer projector, LFM2 decoder.

Decoder blocks are of two kinds, gated short convolution (`conv`) or grouped-query attention (`self_attn`), each
followed by a gated MLP (`w1` gate, `w3` up, `w2` down). A block has the groups whose layers it has.
"""

from __future__ import annotations

from vlmcompress.models._images import adaptive, tiles_or_whole
from vlmcompress.models._placeholders import downsampled
from vlmcompress.models._spec import CLIP, LLAVA_ENGINE, LLAVA_MAPPER, LinearGroup, ModelSpec

SPEC = ModelSpec(
    family="lfm2-vl",
    model_types=("lfm2_vl",),
    layers="model.language_model.layers",
    groups=(
        LinearGroup("conv_in", ("conv.in_proj",), ("operator_norm",)),
        LinearGroup("conv_out", ("conv.out_proj",)),
        LinearGroup(
            "qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("operator_norm",), fused=True
        ),
        LinearGroup("o", ("self_attn.out_proj",), ("self_attn.v_proj",), "linear"),
        LinearGroup("gate_up", ("feed_forward.w1", "feed_forward.w3"), ("ffn_norm",), fused=True),
        LinearGroup("down", ("feed_forward.w2",), ("feed_forward.w3",), "linear"),
    ),
    norm="embedding_norm",
    head_shares=True,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    image_token="image_token_id",
    inner=("conv.conv", "self_attn.q_layernorm", "self_attn.k_layernorm"),
    layout=adaptive,
    placeholders=downsampled,
    sizes=tiles_or_whole,
    visual_grid="shapes",
    kv_scales=False,
    mixed_blocks="short convolutions",
    engine_prefixes=LLAVA_ENGINE,
    engine_mapper=LLAVA_MAPPER,
    engine_parts=(("conv", "short_conv"),),
    hub_prefixes=(("model.vision_tower", "model.vision_tower.vision_model"),),
    tool_calls=("lfm2", "<|tool_list_start|>"),
)

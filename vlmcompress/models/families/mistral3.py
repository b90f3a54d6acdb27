"""Mistral Small 3 and Ministral 3: Pixtral tower at native resolution, patch merger, Mistral or Ministral 3 decoder.

A token that shows nothing ends each row of the image's tokens; it is one of the text's, not a placeholder.
"""

from __future__ import annotations

from vlmcompress.models._images import edges, patched
from vlmcompress.models._placeholders import merged_patches
from vlmcompress.models._spec import LLAMA, LLAVA_MAPPER, LinearGroup, ModelSpec

SPEC = ModelSpec(
    family="mistral3",
    model_types=("mistral3",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.transformer.layers",
    vision_groups=(
        LinearGroup(
            "qkv", ("attention.q_proj", "attention.k_proj", "attention.v_proj"), ("attention_norm",), fused=True
        ),
        LinearGroup("o", ("attention.o_proj",), ("attention.v_proj",), "linear"),
        LinearGroup("gate_up", ("feed_forward.gate_proj", "feed_forward.up_proj"), ("ffn_norm",), fused=True),
        LinearGroup("down", ("feed_forward.down_proj",), ("feed_forward.up_proj",), "linear"),
    ),
    image_token="image_token_index",
    layout=patched,
    placeholders=merged_patches,
    sizes=edges,
    engine_prefixes=LLAVA_MAPPER,
    engine_mapper=(*LLAVA_MAPPER, ("model", "language_model.model")),
    hub_prefixes=LLAVA_MAPPER,
    tool_calls=("mistral", "[TOOL_CALLS]"),
)

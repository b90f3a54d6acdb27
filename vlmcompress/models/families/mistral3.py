"""Mistral Small 3 and Ministral 3: Pixtral tower at native resolution, patch merger, Mistral or Ministral 3 decoder.

Each row of the image's tokens ends with a token that shows nothing; it is a text token, not a placeholder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from vlmcompress.models._images import ImageSetting, Layout, Piece
from vlmcompress.models._spec import LLAMA, LLAVA_MAPPER, EngineNames, Engines, Images, LinearGroup, ModelSpec

ORIGINAL = "original_max_position_embeddings"


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Mistral 3: one grid in the image's own shape, scaled down only where a side is too long."""
    unit = processor.patch_size * processor.spatial_merge_size
    ratio = max(1.0, max(width, height) / processor.image_processor.size["longest_edge"])
    columns, rows = ((math.floor(side / ratio) - 1) // unit + 1 for side in (width, height))
    return Layout((Piece.whole(rows, columns, width, height),))


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of Mistral 3's processor."""
    return {"patch_size": config.vision_config.patch_size, "spatial_merge_size": config.spatial_merge_size}


def sizes(processor: Any) -> list[ImageSetting]:
    """Settings of Mistral 3: the longer side of an image."""
    unit = processor.patch_size * processor.spatial_merge_size
    most = processor.image_processor.size["longest_edge"] // unit
    smaller = [ImageSetting(side**2, {"size": {"longest_edge": side * unit}}) for side in range(1, most)]
    return [*smaller, ImageSetting(most**2)]


def text_defaults(text: Mapping[str, Any]) -> dict[str, Any]:
    """How Ministral 3 scales queries far from the start, where vLLM looks for it (0.32, 0.33: `mistral.py`; issue 48621)."""
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping) or not {"llama_4_scaling_beta", ORIGINAL} <= rope.keys():
        return {}
    return {"llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], ORIGINAL: rope[ORIGINAL]}}


SPEC = ModelSpec(
    family="mistral3",
    model_types=("mistral3",),
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
    layout=layout,
    image_token="image_token_index",
    names=EngineNames(
        prefixes=LLAVA_MAPPER, mapper=(*LLAVA_MAPPER, ("model", "language_model.model")), hub=LLAVA_MAPPER
    ),
    images=Images(placeholders=placeholders, sizes=sizes, token_side=attrgetter("spatial_merge_size")),
    engine=Engines(text_defaults=text_defaults, tool_calls=("mistral", "[TOOL_CALLS]")),
)

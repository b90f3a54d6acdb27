"""Qwen3-VL: ViT whose early features enter the first decoder layers (deepstack), Qwen3 decoder, interleaved M-RoPE.

The deepstack mergers are projectors: they stay as they are, even where the tower's blocks are quantized.
"""

from __future__ import annotations

from vlmcompress.models._images import native, pixels
from vlmcompress.models._placeholders import patch_grid
from vlmcompress.models._spec import LLAMA, QWEN3_TOWER, QWEN_ENGINE, ModelSpec

SPEC = ModelSpec(
    family="qwen3-vl",
    model_types=("qwen3_vl",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.visual",),
    projector=("model.visual.merger", "model.visual.deepstack_merger_list"),
    vision_layers="model.visual.blocks",
    vision_groups=QWEN3_TOWER,
    vision_attention="attn",
    image_token="image_token_id",
    layout=native,
    placeholders=patch_grid,
    sizes=pixels,
    positions="mrope",
    visual_grid="thw",
    engine_prefixes=QWEN_ENGINE,
    engine_mapper=QWEN_ENGINE,
    tool_calls=("hermes", "<tool_call>"),
)

"""InternVL 2.5, 3 and 3.5 in transformers' form (`-HF` checkpoints): InternViT, pixel shuffle, Qwen2, Qwen3 or Llama decoder.

The original checkpoints (`internvl_chat`) bring their model along as Python code and are not supported.

vLLM 0.32 builds this tower without a quantization config, so none of it can be quantized.
"""

from __future__ import annotations

from vlmcompress.models._images import tiled, tiles
from vlmcompress.models._placeholders import shuffled
from vlmcompress.models._spec import LLAMA, LLAVA_MAPPER, ModelSpec

SPEC = ModelSpec(
    family="internvl",
    model_types=("internvl",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layer",
    vision_groups=(),
    image_token="image_token_id",
    layout=tiled,
    placeholders=shuffled,
    sizes=tiles,
    visual_grid="tiles",
    vision_joint=("attention", "layernorm_after"),
    engine_prefixes=LLAVA_MAPPER,
    engine_mapper=LLAVA_MAPPER,
    hub_prefixes=LLAVA_MAPPER,
)

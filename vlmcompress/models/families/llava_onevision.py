"""LLaVA-OneVision: SigLIP tower on tiles (anyres), two-layer projector, Qwen2 decoder."""

from __future__ import annotations

from vlmcompress.models._images import anyres, canvases
from vlmcompress.models._placeholders import patches
from vlmcompress.models._spec import CLIP, LLAMA, LLAVA_ENGINE, LLAVA_MAPPER, ModelSpec

SPEC = ModelSpec(
    family="llava-onevision",
    model_types=("llava_onevision",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    image_token="image_token_index",
    newlines=("model.image_newline",),
    layout=anyres,
    placeholders=patches,
    sizes=canvases,
    visual_grid="anyres",
    vision_units="resized",
    engine_prefixes=LLAVA_ENGINE,
    engine_mapper=LLAVA_MAPPER,
    hub_prefixes=LLAVA_ENGINE,
)

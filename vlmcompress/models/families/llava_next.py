"""LLaVA-NeXT (1.6): LLaVA-1.5 on several tiles of the image, with a learned newline between rows of patches."""

from __future__ import annotations

from vlmcompress.models._images import anyres, canvases
from vlmcompress.models._placeholders import clip_patches
from vlmcompress.models._spec import CLIP, LLAMA, LLAVA_ENGINE, LLAVA_MAPPER, ModelSpec

SPEC = ModelSpec(
    family="llava-next",
    model_types=("llava_next",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    image_token="image_token_index",
    newlines=("model.image_newline",),
    layout=anyres,
    placeholders=clip_patches,
    sizes=canvases,
    visual_grid="anyres",
    vision_units="patch",
    vision_joint=("self_attn", "layer_norm2"),
    engine_prefixes=LLAVA_ENGINE,
    engine_mapper=LLAVA_MAPPER,
    hub_prefixes=LLAVA_ENGINE,
)

"""LLaVA-1.5: CLIP tower, two-layer projector, Llama or Mistral decoder, one image placeholder per visual token."""

from __future__ import annotations

from vlmcompress.models._images import square
from vlmcompress.models._placeholders import clip_patches
from vlmcompress.models._spec import CLIP, LLAMA, LLAVA_ENGINE, LLAVA_MAPPER, ModelSpec

SPEC = ModelSpec(
    family="llava",
    model_types=("llava",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    image_token="image_token_index",
    layout=square,
    placeholders=clip_patches,
    visual_grid="patches",
    vision_cls=True,
    vision_units="patch",
    vision_joint=("self_attn", "layer_norm2"),
    engine_prefixes=LLAVA_ENGINE,
    engine_mapper=LLAVA_MAPPER,
    hub_prefixes=LLAVA_ENGINE,
)

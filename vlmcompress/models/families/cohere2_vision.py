"""Cohere2-Vision (Command A Vision): SigLIP on tiles, gated projector, Cohere 2 decoder.

Attention and MLP of a block read the same normed hidden states, so a scale folded into that norm would have to suit both; none
is folded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from vlmcompress.models._images import Layout, side_length
from vlmcompress.models._spec import (
    ATTENTION_OUT,
    CLIP,
    DOWN,
    GATE_UP,
    QKV,
    EngineNames,
    Engines,
    Images,
    ModelSpec,
    Prefixes,
)
from vlmcompress.models.families import internvl

ENGINE: Prefixes = (
    ("model.language_model", "language_model.model"),
    ("model.vision_tower", "vision_tower"),
    ("model.multi_modal_projector", "multi_modal_projector"),
)
HUB: Prefixes = (("model.vision_tower", "model.vision_tower.vision_model"),)


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Cohere2-Vision: tiles in the best fitting arrangement, then the whole image."""
    from transformers.models.cohere2_vision.image_processing_cohere2_vision import get_optimal_tiled_canvas

    images_of = processor.image_processor
    tile = (images_of.size["height"], images_of.size["width"])
    across, down = get_optimal_tiled_canvas((height, width), tile, images_of.min_patches, images_of.max_patches)
    return Layout.of_tiles(processor.patch_size, int(across), int(down), width, height)


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of Cohere2-Vision's processor, which calls the side of a tile in tokens `patch_size`."""
    vision = config.vision_config
    patches = side_length(vision.image_size) // side_length(vision.patch_size)
    return {"image_processor.patch_size": patches // config.downsample_factor}


def sizes(processor: Any) -> Any:
    """Settings of Cohere2-Vision: the most tiles of an image."""
    return internvl.tile_settings(processor.image_processor, processor.patch_size**2)


def vllm_differs(config: Mapping[str, Any], cpu: bool) -> str | None:
    """vLLM adds one to the window (0.32: `model_executor/models/commandr.py`)."""
    return "windows of attention reach one token further in vLLM (it shows in prompts longer than they are)"


SPEC = ModelSpec(
    family="cohere2-vision",
    model_types=("cohere2_vision",),
    groups=(replace(QKV, smooth=()), ATTENTION_OUT, replace(GATE_UP, smooth=()), DOWN),
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    layout=layout,
    mixed_blocks="attention in windows",
    names=EngineNames(prefixes=(("model.vision_tower", "vision_tower.vision_model"), *ENGINE), mapper=ENGINE, hub=HUB),
    images=Images(placeholders=placeholders, sizes=sizes, token_side=attrgetter("downsample_factor"), grid="tiles"),
    engine=Engines(head_shares=True, vllm_differs=vllm_differs),
)

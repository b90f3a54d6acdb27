"""Granite 4 Vision: SigLIP on LLaVA-NeXT's tiles, a Q-Former for each decoder block that gets image features, Granite decoder.

A placeholder's embedding is zero: several layers of the tower are each scaled down by a Q-Former of its own, and added before
a decoder block. The Q-Formers are projectors: they are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from vlmcompress.models._images import ImageSetting, Layout
from vlmcompress.models._spec import CLIP, LLAMA, EngineNames, Images, ModelSpec, Prefixes
from vlmcompress.models.families import llava_next

ENGINE: Prefixes = (
    ("model.language_model", "language_model.model"),
    ("model.layerwise_projectors", "layerwise_projectors"),
    ("model.spatial_projectors", "spatial_projectors"),
    ("model.image_newline", "image_newline"),
    ("model.vision_tower", "vision_tower"),
    ("lm_head", "language_model.lm_head"),
)


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of LLaVA-NeXT, with tokens of several patches."""
    return llava_next.layout(_of_tokens(processor), width, height, images)


def sizes(processor: Any) -> list[ImageSetting]:
    """Settings of LLaVA-NeXT."""
    return llava_next.sizes(_of_tokens(processor))


def _of_tokens(processor: Any) -> Any:
    """The processor, with the side of a visual token in place of a patch's."""
    side = processor.patch_size / Fraction(processor.downsample_rate)
    return SimpleNamespace(image_processor=processor.image_processor, patch_size=int(side))


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of Granite 4 Vision's processor."""
    return {
        "patch_size": config.vision_config.patch_size,
        "downsample_rate": config.downsample_rate,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": int(config.vision_feature_select_strategy == "default"),
    }


def levels(config: Mapping[str, Any]) -> int:
    """Number of decoder blocks that get rows of each visual token."""
    return sum(len(config.get(key) or ()) for key in ("deepstack_layer_map", "spatial_target_layers"))


def features(output: Any) -> Any:
    """The rows of the first of these blocks: those of all have one shape, and none is in the embedding's place."""
    return output.deepstack_features[0][1]


SPEC = ModelSpec(
    family="granite4-vision",
    model_types=("granite4_vision",),
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.layerwise_projectors", "model.spatial_projectors"),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    layout=layout,
    layers="model.language_model.layers",
    image_token="image_token_index",
    names=EngineNames(
        prefixes=(("model.vision_tower", "vision_tower.vision_model"), *ENGINE),
        mapper=ENGINE,
        hub=(("model.vision_tower", "model.vision_tower.vision_model"),),
    ),
    images=Images(
        newlines=("model.image_newline",),
        levels=levels,
        features=features,
        placeholders=placeholders,
        processor=llava_next.image_processor,
        sizes=sizes,
    ),
)

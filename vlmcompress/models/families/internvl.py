"""InternVL 2.5, 3 and 3.5 in transformers' form (`-HF` checkpoints): InternViT, pixel shuffle, Qwen2, Qwen3 or Llama decoder.

The original checkpoints (`internvl_chat`) contain their model as Python code and are not supported.

vLLM 0.32 builds this tower without a quantization config, so none of it can be quantized.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from vlmcompress.models._images import ImageSetting, Layout, side_length, square_patches
from vlmcompress.models._spec import LLAMA, LLAVA_MAPPER, EngineNames, Engines, Images, MlxClass, ModelSpec, Tower


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of InternVL: tiles in the best fitting arrangement, then the whole image."""
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    images_of = processor.image_processor
    tile = (images_of.size["height"], images_of.size["width"])
    across, down = get_optimal_tiled_canvas((height, width), tile, images_of.min_patches, images_of.max_patches)
    return Layout.of_tiles(math.isqrt(processor.image_seq_length), across, down, width, height)


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of InternVL's processor."""
    return {"image_seq_length": int(square_patches(config.vision_config) * config.downsample_ratio**2)}


def sizes(processor: Any) -> list[ImageSetting]:
    """Settings of InternVL: the most tiles of an image."""
    return tile_settings(processor.image_processor, processor.image_seq_length)


def tile_settings(images_of: Any, each: int) -> list[ImageSetting]:
    """Settings of an image processor (`Images.sizes`), fewest tokens first: the most tiles of an image, and its own setting
    last. A tile has `each` tokens; from two tiles on, a small copy of the whole image is one more."""
    settings = [
        ImageSetting(each * (count + (count > 1)), {"max_patches": count})
        for count in range(max(1, images_of.min_patches), images_of.max_patches)
    ]
    return [*settings, ImageSetting(each * (images_of.max_patches + (images_of.max_patches > 1)))]


def image_processor(config: Any) -> Any:
    """The tile settings of published checkpoints: at most twelve."""
    edge = side_length(config.vision_config.image_size)
    return SimpleNamespace(size={"height": edge, "width": edge}, min_patches=1, max_patches=12)


def video(processor: Any, frames: int, width: int, height: int) -> tuple[int, int, int]:
    """Grid of a video: frames of one tile each."""
    edge = math.isqrt(int(processor.image_seq_length))
    return frames, edge, edge


def token_side(config: Any) -> int:
    """Pixel shuffle."""
    return round(1 / config.downsample_ratio)


SPEC = ModelSpec(
    family="internvl",
    model_types=("internvl",),
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layer",
    vision_groups=(),
    layout=layout,
    names=EngineNames(prefixes=LLAVA_MAPPER, mapper=LLAVA_MAPPER, hub=LLAVA_MAPPER),
    tower=Tower(joint=("attention", "layernorm_after"), merging=(("internvl_vision", "default"),)),
    images=Images(
        placeholders=placeholders,
        processor=image_processor,
        sizes=sizes,
        video=video,
        token_side=token_side,
        grid="tiles",
    ),
    engine=Engines(mlx=MlxClass(decoder="qwen3", fewer_tokens=True)),
)

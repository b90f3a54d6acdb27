"""LLaVA-NeXT (1.6): LLaVA-1.5 on several tiles of the image, with a learned newline between rows of patches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from vlmcompress.models._images import ImageSetting, Layout, Piece, cut
from vlmcompress.models._spec import CLIP, LLAMA, LLAVA_NAMES, Images, ModelSpec, Tower
from vlmcompress.models.families import llava


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of LLaVA-NeXT and OneVision: the whole image, then its joined tiles, without padding, row by row."""
    from transformers.image_processing_utils import select_best_resolution

    whole = (0.0, 0.0, float(width), float(height))
    size, aspect = processor.image_processor.size, getattr(processor, "vision_aspect_ratio", None)
    side = size.get("shortest_edge") or size["height"]
    n = math.isqrt(processor.num_image_tokens) if aspect else side // processor.patch_size
    if aspect and images > 1:
        return Layout((Piece(n, n, whole, "end"),))
    canvas = select_best_resolution((height, width), processor.image_processor.image_grid_pinpoints)
    rows, columns = n * (canvas[0] // side), n * (canvas[1] // side)
    tiles = (canvas[0] // side) * (canvas[1] // side)
    scale = min(canvas[1] / width, canvas[0] / height)
    x, y = (min(math.ceil(length * scale), edge) for length, edge in ((width, canvas[1]), (height, canvas[0])))
    unit = (x / width, y / height)  # pixels of the canvas for each of the image, across and down
    left, top = -((canvas[1] - x) // 2) / unit[0], -((canvas[0] - y) // 2) / unit[1]
    box = (left, top, left + canvas[1] / unit[0], top + canvas[0] / unit[1])
    used = (rows, columns)
    if width / height > columns / rows:
        used = (rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns)
    else:
        used = (rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2)
    start = ((columns - used[1]) / 2, (rows - used[0]) / 2)
    box = cut(box, (columns, rows), start, {"width": used[1], "height": used[0]})
    if aspect:
        ratio = math.sqrt(used[0] * used[1] / (int(aspect.removeprefix("anyres_max_")) * n**2))
        used = (int(used[0] // ratio), int(used[1] // ratio)) if ratio > 1.1 else used
    return Layout((Piece(n, n, whole), Piece(used[0], used[1], box, "rows", tiles)))


def sizes(processor: Any) -> list[ImageSetting]:
    """Settings of LLaVA-NeXT and OneVision: the allowed tile grids, with the largest ones left out."""
    points = [list(point) for point in processor.image_processor.image_grid_pinpoints]
    areas = sorted({high * wide for high, wide in points})
    settings = []
    for area in areas:
        left = {"image_grid_pinpoints": [point for point in points if point[0] * point[1] <= area]}
        changed = ImageSetting(0, left).applied(processor)
        tokens = max(layout(changed, wide, high, 1).tokens for high, wide in left["image_grid_pinpoints"])
        settings.append(ImageSetting(tokens, left, left))
    settings.sort(key=lambda setting: setting.tokens)
    return [*settings[:-1], ImageSetting(settings[-1].tokens)]


def image_processor(config: Any) -> Any:
    """Tiles of the encoder's size, in the tile grids of the config."""
    return SimpleNamespace(
        size={"shortest_edge": config.vision_config.image_size}, image_grid_pinpoints=config.image_grid_pinpoints
    )


SPEC = ModelSpec(
    family="llava-next",
    model_types=("llava_next",),
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    layout=layout,
    image_token="image_token_index",
    names=LLAVA_NAMES,
    tower=Tower(units="packed"),
    images=Images(
        newlines=("model.image_newline",),
        placeholders=llava.placeholders,
        processor=image_processor,
        sizes=sizes,
        grid="anyres",
    ),
)

"""Sizes: the settings of a processor by which its images get fewer tokens, because they are made smaller before the encoder.

Each function is a value of `ModelSpec.sizes`, one for each way of cutting an image up (`_layout`): it lists the settings from
the one with the fewest tokens to the one that the processor has. Every one keeps the image's shape and is a setting that
the family's own processor has, so that whatever engine reads the checkpoint's processor makes images of that size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmcompress.models._layout import anyres


@dataclass(frozen=True)
class ImageSetting:
    """A setting of a processor.

    Attributes:
        tokens: the most visual tokens that an image of an ordinary shape has with it.
        image_processor: settings of the image processor that differ from those it has.
        config: entries of config.json that have to say the same.
    """

    tokens: int
    image_processor: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, processor: Any) -> Any:
        """A copy of the processor that has this setting."""
        own = processor.image_processor
        changed = copy.copy(processor)
        changed.image_processor = type(own).from_dict(own.to_dict() | dict(self.image_processor))
        return changed


Sizes = Callable[[Any], list[ImageSetting]]
"""A function of a processor: its settings, those with the fewest tokens first; the last one is as it is now."""


def pixels(processor: Any) -> list[ImageSetting]:
    """Settings of the Qwen family: the most pixels of an image."""
    return _pixels(processor, 1)


def film_pixels(processor: Any) -> list[ImageSetting]:
    """Settings of GLM-V: the most pixels of an image that counts as a film of some frames."""
    return _pixels(processor, processor.image_processor.temporal_patch_size)


def _pixels(processor: Any, frames: int) -> list[ImageSetting]:
    images_of = processor.image_processor
    unit = (images_of.patch_size * images_of.merge_size) ** 2 * frames
    low, high = images_of.size["shortest_edge"], images_of.size["longest_edge"]
    least, most = max(1, -(-low // unit)), high // unit
    return [
        ImageSetting(tokens, {"size": {"shortest_edge": low, "longest_edge": tokens * unit}})
        for tokens in range(least, most)
    ] + [ImageSetting(most)]


def edges(processor: Any) -> list[ImageSetting]:
    """Settings of Mistral 3: the longer side of an image."""
    unit = processor.patch_size * processor.spatial_merge_size
    most = processor.image_processor.size["longest_edge"] // unit
    smaller = [ImageSetting(side**2, {"size": {"longest_edge": side * unit}}) for side in range(1, most)]
    return [*smaller, ImageSetting(most**2)]


def budgets(processor: Any) -> list[ImageSetting]:
    """Settings of Gemma 4: the budget of tokens, one of those that it was trained with."""
    now = processor.image_processor.max_soft_tokens
    trained = (70, 140, 280, 560, 1120)
    return [ImageSetting(one, {"max_soft_tokens": one}) for one in trained if one < now] + [ImageSetting(now)]


def tiles(processor: Any) -> list[ImageSetting]:
    """Settings of InternVL: the most tiles that an image is cut into; there is the whole image besides, where there are two."""
    images_of, each = processor.image_processor, processor.image_seq_length
    settings = [
        ImageSetting(each * (count + (count > 1)), {"max_patches": count})
        for count in range(max(1, images_of.min_patches), images_of.max_patches)
    ]
    return [*settings, ImageSetting(each * (images_of.max_patches + (images_of.max_patches > 1)))]


def tile_edges(processor: Any) -> list[ImageSetting]:
    """Settings of Idefics3 and SmolVLM: the longer side of an image, in tiles."""
    images_of, each = processor.image_processor, processor.image_seq_len
    if not images_of.do_image_splitting or not images_of.do_resize:
        return [ImageSetting(each)]
    side = images_of.max_image_size["longest_edge"]
    now = images_of.size["longest_edge"]
    counts = range(1, math.ceil(now / side) + 1)
    found = [ImageSetting(_split(each, count), {"size": {"longest_edge": count * side}}) for count in counts]
    return [*found[:-1], ImageSetting(found[-1].tokens)]


def _split(each: int, side: int) -> int:
    """Tokens of a square image that is `side` tiles long."""
    return each * (side**2 + 1) if side > 1 else each


def canvases(processor: Any) -> list[ImageSetting]:
    """Settings of LLaVA-NeXT and OneVision: the canvases of tiles that an image may lie on, without the largest ones."""
    points = [list(point) for point in processor.image_processor.image_grid_pinpoints]
    areas = sorted({high * wide for high, wide in points})
    found = []
    for area in areas:
        left = {"image_grid_pinpoints": [point for point in points if point[0] * point[1] <= area]}
        changed = ImageSetting(0, left).applied(processor)
        tokens = max(anyres(changed, wide, high, 1).tokens for high, wide in left["image_grid_pinpoints"])
        found.append(ImageSetting(tokens, left, left))
    found.sort(key=lambda one: one.tokens)
    return [*found[:-1], ImageSetting(found[-1].tokens)]


def tiles_or_whole(processor: Any) -> list[ImageSetting]:
    """Settings of LFM2-VL: the most tiles of a large image, and below two of them the most tokens of a whole one."""
    images_of = processor.image_processor
    low, high = images_of.min_image_tokens, images_of.max_image_tokens
    whole = [
        ImageSetting(tokens, {"do_image_splitting": False, "max_image_tokens": tokens}) for tokens in range(low, high)
    ]
    if not images_of.do_image_splitting or images_of.max_tiles == 1:
        return [*whole, ImageSetting(high)]
    each = math.ceil(images_of.tile_size // images_of.encoder_patch_size / images_of.downsample_factor) ** 2
    besides = high if images_of.use_thumbnail else 0
    cut = [
        ImageSetting(max(count * each + besides, high), {"max_tiles": count})
        for count in range(max(2, images_of.min_tiles), images_of.max_tiles)
    ]
    last = ImageSetting(images_of.max_tiles * each + besides)
    return [*whole, ImageSetting(high, {"do_image_splitting": False}), *cut, last]

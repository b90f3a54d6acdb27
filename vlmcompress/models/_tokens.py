"""Sizes of patches, tokens and tiles, from a model's config as transformers has it."""

from __future__ import annotations

from typing import Any

from vlmcompress.models._images import side_length
from vlmcompress.models._read import spec_for


def patch_side(config: Any) -> int:
    """The side of a patch, in pixels."""
    return side_length(config.vision_config.patch_size)


def block_side(config: Any) -> int:
    """Side of the square of patches that form one token (`Images.token_side`); 1 if a patch is a token."""
    token_side = spec_for({"model_type": config.model_type}).images.token_side
    return token_side(config) if token_side else 1


def tile_grid(config: Any) -> tuple[int, int, int]:
    """The grid of one tile, or of an image where all have one size, after the pixel shuffle or the pooling."""
    size, unit = config.vision_config.image_size, patch_side(config) * block_side(config)
    rows, columns = size if isinstance(size, list | tuple) else (size, size)
    return (1, rows // unit, columns // unit)

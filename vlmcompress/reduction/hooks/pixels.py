"""Cut what a processor makes of images into the pixels that each visual token shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmcompress.reduction.methods import Grid


def pictures(inputs: Mapping[str, Any]) -> Tensor:
    """The encoder's inputs `[images, 3, height, width]` for inputs of the model: images, or all their tiles."""
    pixels = inputs["pixel_values"]
    if pixels.ndim == 4:
        return pixels
    every = pixels.flatten(0, 1)
    return every[(every != 0).flatten(1).any(1)]  # the model also skips all-zero tiles


def unit_pixels(pixels: Tensor, grids: Sequence[Grid], packed: bool, image_processor: Any) -> Iterator[Tensor]:
    """Colour values `[n, values]`, with 1 between black and white, of the units that the tokens of each grid show.

    Args:
        pixels: pictures `[pictures, 3, height, width]`, one for each of `grids`; if `packed`, the patches of all pictures,
            `[patches, values]` with the patches of a token together, or `[patches, 3, side, side]` row by row. Whole numbers
            are levels from 0 to 255, which are normalized later (as vLLM does on the device).
        image_processor: whose `image_mean` and `image_std` normalize.
    """
    values = _colours(pixels.detach(), image_processor)
    if not packed:
        for picture, (_, rows, columns) in zip(values, grids, strict=True):
            units = picture.unflatten(1, (rows, -1)).unflatten(3, (columns, -1))  # [3, rows, height, columns, width]
            yield units.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)
        return
    of_token = len(values) // sum(frames * rows * columns for frames, rows, columns in grids)
    start = 0
    for frames, rows, columns in grids:
        patches = values[start : start + frames * rows * columns * of_token]
        start += len(patches)
        if values.ndim == 4:  # PaddleOCR-VL, which joins the patches of a token after its encoder
            side = round(of_token**0.5)
            patches = patches.unflatten(0, (frames, rows, side, columns, side)).transpose(2, 3).flatten(0, 4)
        yield patches.unflatten(0, (-1, of_token)).flatten(1)


def _colours(pixels: Tensor, image_processor: Any) -> Tensor:
    """The pixels as colour values, shifted by the mean, which differences do not see.

    Normalized ones are rounded to bfloat16 first, so that every engine and type gets the same.
    """
    whole = not pixels.is_floating_point()
    channels = pixels.flatten(1).unflatten(1, (3, -1)).float()
    std = torch.ones((), device=pixels.device)
    if whole or getattr(image_processor, "do_normalize", False):
        mean, std = (
            torch.tensor(getattr(image_processor, name), device=pixels.device)[:, None]
            for name in ("image_mean", "image_std")
        )
        if whole:
            channels = (channels - 255 * mean) / (255 * std)
    return (channels.to(torch.bfloat16).float() * std).view(pixels.shape)

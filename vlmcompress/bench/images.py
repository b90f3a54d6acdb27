"""Generated images with the statistics of natural ones, for requests whose cost depends on content.

`dead_leaves` draws the dead-leaves model: opaque discs with radii of density r^-3 covering one another. It has what
natural images have in common, a power spectrum that falls with about the square of the frequency, flat regions and sharp
edges by occlusion (Lee, Mumford and Huang, Int. J. Computer Vision 41, 2001, 35-59). Independent noise in each pixel, as
vLLM's `random-mm` has it, compresses and prunes like nothing that a user sends.

`stamp` makes equal images different for every cache while the model sees the same.
"""

from __future__ import annotations

import re

import numpy as np
from PIL import Image, ImageDraw

from vlmcompress.errors import UserError

STAMP_BITS = 48
_LIMITS = (28, 4096)


def parse_size(text: str) -> tuple[int, int]:
    """Read `448x336` as (width, height); `448` is a square.

    Raises:
        UserError: not such a text, or a side is below 28 or above 4096 pixels.
    """
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    width, height = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not all(_LIMITS[0] <= side <= _LIMITS[1] for side in (width, height)):
        raise UserError(f"--sizes {text}: should be WIDTHxHEIGHT, each from {_LIMITS[0]} to {_LIMITS[1]}; e.g. 448x336")
    return width, height


def dead_leaves(size: tuple[int, int], seed: int) -> Image.Image:
    """Draw an RGB image of (width, height) pixels; equal seeds give equal images."""
    draw, (width, height) = np.random.default_rng(seed), size
    image = Image.new("RGB", size)
    pen = ImageDraw.Draw(image)
    smallest, largest = 3.0, max(width, height) / 3
    # r^-3 has 1/r^2 as its tail: inverse transform between the smallest and the largest radius.
    tail = draw.uniform(largest**-2, smallest**-2, _leaves(width * height, smallest, largest))
    radii = tail**-0.5
    centres = draw.uniform((-largest, -largest), (width + largest, height + largest), (len(radii), 2))
    grey = draw.uniform(0, 256, (len(radii), 1))  # colours of nature vary in lightness much more than in hue
    colours = np.clip(grey + draw.normal(0, 25, (len(radii), 3)), 0, 255).astype(int)
    for radius, (x, y), colour in zip(radii.tolist(), centres.tolist(), colours.tolist(), strict=True):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tuple(colour))
    return image


def _leaves(pixels: int, smallest: float, largest: float) -> int:
    """Number of discs that cover the canvas about six times, by their mean area 2 pi ln(largest / smallest) / tail mass."""
    mass = smallest**-2 - largest**-2
    area = 2 * np.pi * np.log(largest / smallest) / mass
    return int(6 * (pixels**0.5 + 2 * largest) ** 2 / area)


def stamp(image: Image.Image, serial: int) -> Image.Image:
    """Copy an image with `serial` (below 2^48) in the lowest bits of its first pixels: no channel changes by more than 1."""
    pixels = np.array(image.convert("RGB"))
    flat = pixels.reshape(-1)
    bits = np.array([serial >> i & 1 for i in range(STAMP_BITS)], dtype=np.uint8)
    flat[:STAMP_BITS] = flat[:STAMP_BITS] & 0xFE | bits
    return Image.fromarray(pixels)

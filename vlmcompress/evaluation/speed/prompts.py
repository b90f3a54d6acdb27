"""The prompts of a benchmark: conversations with images, in numbered bursts.

A burst is a function of its number alone, so both sides get the same bytes. No two requests of a benchmark have an image
in common, whatever the source holds: where it has fewer images than are needed they are used again, stamped so that to
every cache they are new (see `stamp`).
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vlmcompress.models.data.samples import Sample
from vlmcompress.models.data.sources import PROMPTS, bundled_data, load_samples
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError

DEFAULT_SIZE = (448, 448)
STAMP_BITS = 48


@dataclass(frozen=True)
class Prompts:
    """A source of conversations.

    Attributes:
        source: description of the source.
        samples: conversations with images; empty: generated images with a question from a short list.
        sizes: (width, height) of images, used in rotation; empty: their original sizes.
    """

    source: str
    samples: Sequence[Sample] = field(repr=False)
    sizes: Sequence[tuple[int, int]]
    seed: int = 0

    @property
    def images(self) -> int:
        """The maximum number of images in a conversation."""
        return max((len(sample.images) for sample in self.samples), default=1)

    def burst(self, number: int, requests: int) -> list[list[dict[str, Any]]]:
        """The messages of a burst's requests, OpenAI-style, with images as PNG in data URIs."""
        first = number * requests
        return [self._messages(serial) for serial in range(first, first + requests)]

    def _messages(self, serial: int) -> list[dict[str, Any]]:
        size = self.sizes[serial % len(self.sizes)] if self.sizes else None
        if not self.samples:
            image = dead_leaves(size or DEFAULT_SIZE, self.seed * 2**32 + serial)
            text = {"type": "text", "text": PROMPTS[serial % len(PROMPTS)]}
            return [{"role": "user", "content": [_part(image), text]}]
        sample = self.samples[serial % len(self.samples)]
        pictures = [image if size is None else image.resize(size, Image.Resampling.LANCZOS) for image in sample.images]
        parts = (_part(stamp(picture, serial)) for picture in pictures)
        turns = sample.prompt()
        for turn in turns:
            turn["content"] = [next(parts) if part["type"] == "image" else part for part in turn["content"]]
        return turns


def open_prompts(
    data: str | Path | None, sizes: Sequence[tuple[int, int]], candidate: Path, baseline: Path, seed: int
) -> Prompts:
    """Open the prompts of a data set or folder of images, without rows that have no image or a video.

    If `data` is None they are bundled with a demo model, or generated images if there are none or sizes are given.

    Raises:
        UserError: the data are missing or damaged, or have no image at all.
    """
    source = (
        hub.local(data, "dataset", splits=hub.TEST)
        if data
        else (None if sizes else bundled_data(baseline, "test") or bundled_data(candidate, "test"))
    )
    if source is None:
        return Prompts("generated images (dead leaves)", (), sizes or (DEFAULT_SIZE,), seed)
    samples = load_samples(source, samples=None, seed=seed, decode_images=False)
    with_images = [sample for sample in samples if sample.images and not sample.videos]
    if not with_images:
        raise UserError(f"{source}: no row has an image; give --data with some, or --sizes for generated ones")
    random.Random(seed).shuffle(with_images)
    return Prompts(hub.display_path(source), with_images, sizes, seed)


def _part(image: Image.Image) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=1)
    address = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": address}}


def dead_leaves(size: tuple[int, int], seed: int) -> Image.Image:
    """Draw an RGB image of (width, height) pixels; equal seeds give equal images."""
    draw, (width, height) = np.random.default_rng(seed), size
    image = Image.new("RGB", size)
    pen = ImageDraw.Draw(image)
    smallest, largest = 3.0, max(width, height) / 3
    # r^-3 has 1/r^2 as its tail: inverse transform between the smallest and the largest radius.
    # Dead leaves with radii ~ r^-3 have the 1/f^2 power spectrum of photographs (Lee, Mumford and Huang, IJCV 41, 2001).
    # Enough discs to cover the canvas six times, by their mean area 2 pi ln(largest / smallest) / mass.
    mass = smallest**-2 - largest**-2
    area = 2 * np.pi * np.log(largest / smallest) / mass
    tail = draw.uniform(largest**-2, smallest**-2, int(6 * ((width * height) ** 0.5 + 2 * largest) ** 2 / area))
    radii = tail**-0.5
    centres = draw.uniform((-largest, -largest), (width + largest, height + largest), (len(radii), 2))
    grey = draw.uniform(0, 256, (len(radii), 1))  # natural colours vary more in lightness than in hue
    colours = np.clip(grey + draw.normal(0, 25, (len(radii), 3)), 0, 255).astype(int)
    for radius, (x, y), colour in zip(radii.tolist(), centres.tolist(), colours.tolist(), strict=True):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tuple(colour))
    return image


def stamp(image: Image.Image, serial: int) -> Image.Image:
    """Copy an image with `serial` (below 2^48) in the lowest bits of its first pixels: no channel changes by more than 1."""
    pixels = np.array(image.convert("RGB"))
    flat = pixels.reshape(-1)
    bits = np.array([serial >> i & 1 for i in range(STAMP_BITS)], dtype=np.uint8)
    flat[:STAMP_BITS] = flat[:STAMP_BITS] & 0xFE | bits
    return Image.fromarray(pixels)

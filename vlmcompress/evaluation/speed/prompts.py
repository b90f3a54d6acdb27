"""The requests of a benchmark: conversations with images, the same for both sides and all repeats."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vlmcompress.models.data.sources import PROMPTS, bundled_data, load_samples
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError

GENERATED_SIZE = (448, 448)
Messages = list[dict[str, Any]]
"""A conversation, OpenAI-style, with images as PNG in data URIs."""


@dataclass(frozen=True)
class Prompts:
    """A benchmark's requests.

    Attributes:
        source: description of the source.
        conversations: one for each request.
        keep: the share, or number, of visual tokens of each request, for sides whose reducer takes it; None: its own.
        images: the maximum number of images in a conversation.
        size: (width, height) of all images; None: they have different sizes.
    """

    source: str
    conversations: list[Messages] = field(repr=False)
    images: int = 1
    size: tuple[int, int] | None = None
    keep: tuple[float | None, ...] = ()


def open_prompts(
    data: str | Path | None,
    candidate: Path,
    baseline: Path,
    requests: int,
    seed: int,
    size: tuple[int, int] | None = None,
) -> Prompts:
    """Draw so many conversations from a data set or folder of images, without rows that have no image or a video.

    Rows are used again where there are too few. If `data` is None they are bundled with a demo model, or short questions about
    generated images if there are none. Images are scaled to `size`.

    Raises:
        UserError: the data are missing or damaged, or have no image at all.
    """
    bundled = bundled_data(baseline, "test") or bundled_data(candidate, "test")
    if (source := hub.local(data, "dataset", splits=hub.TEST) if data else bundled) is None:
        size = size or GENERATED_SIZE
        images = (dead_leaves(size, seed * 2**32 + number) for number in range(requests))
        pairs = zip(images, cycle(PROMPTS), strict=False)
        conversations = [
            [{"role": "user", "content": [_part(image), {"type": "text", "text": text}]}] for image, text in pairs
        ]
        return Prompts("generated images (dead leaves)", conversations, size=size)
    samples = load_samples(source, samples=None, seed=seed, decode_images=False)
    with_images = [sample for sample in samples if sample.images and not sample.videos]
    if not with_images:
        raise UserError(f"{source}: no row has an image; give --data with some")
    random.Random(seed).shuffle(with_images)
    conversations = []
    drawn = list(islice(cycle(with_images), requests))
    for sample in drawn:
        parts = (_part(image.resize(size or image.size, Image.Resampling.LANCZOS)) for image in sample.images)
        turns = sample.prompt()
        for turn in turns:
            turn["content"] = [next(parts) if part["type"] == "image" else part for part in turn["content"]]
        conversations.append(turns)
    most, keep = max(len(sample.images) for sample in with_images), tuple(sample.keep for sample in drawn)
    return Prompts(
        hub.display_path(source), conversations, most, size, keep if any(share is not None for share in keep) else ()
    )


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

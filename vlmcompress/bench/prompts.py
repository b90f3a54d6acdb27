"""The prompts of a benchmark: conversations with images, in numbered bursts.

A burst is a function of its number alone, so both sides get the same bytes. No two requests of a benchmark have an image
in common, whatever the source holds: where it has fewer images than are needed they are used again, stamped so that to
every cache they are new (see `images.stamp`).
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from vlmcompress.bench.images import dead_leaves, stamp
from vlmcompress.common import hub
from vlmcompress.data.samples import Sample
from vlmcompress.data.sources import PROMPTS, bundled, load_samples
from vlmcompress.errors import UserError

DEFAULT_SIZE = (448, 448)


@dataclass(frozen=True)
class Prompts:
    """A source of conversations.

    Attributes:
        source: description of the source for people.
        samples: conversations with images; empty: generated images with a question from a short list.
        sizes: (width, height) that images get in turn; empty: their own.
    """

    source: str
    samples: Sequence[Sample] = field(repr=False)
    sizes: Sequence[tuple[int, int]]
    seed: int = 0

    @property
    def images(self) -> int:
        """The most images in one conversation."""
        return max((len(sample.images) for sample in self.samples), default=1)

    def burst(self, number: int, requests: int) -> list[list[dict[str, Any]]]:
        """Make the messages of a burst's requests, OpenAI-style, with images as PNG in data URIs."""
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
    """Open the prompts of a data set or folder of images, without rows that have no image.

    Where `data` is None they are those bundled with a demo model, or generated images if there are none or sizes are given.

    Raises:
        UserError: the data are missing or broken, or have no image at all.
    """
    source = (
        hub.local(data, "dataset", splits=hub.TEST)
        if data
        else (None if sizes else bundled(baseline, "test") or bundled(candidate, "test"))
    )
    if source is None:
        return Prompts("generated images (dead leaves)", (), sizes or (DEFAULT_SIZE,), seed)
    samples = load_samples(source, samples=None, seed=seed, check_images=False)
    with_images = [sample for sample in samples if sample.images]
    if not with_images:
        raise UserError(f"{source}: no row has an image; give --data with some, or --sizes for generated ones")
    random.Random(seed).shuffle(with_images)
    return Prompts(hub.shown(source), with_images, sizes, seed)


def _part(image: Image.Image) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=1)
    address = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": address}}

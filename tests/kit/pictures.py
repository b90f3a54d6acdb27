"""Small images, files to break, and how a refusal has to look."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmcompress.models.data.samples import Sample
from vlmcompress.utils.errors import UserError


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    """Random RGB pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    """The image's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def contents(sample: Sample) -> list:
    """Per turn of the conversation: role, then texts and image widths in order."""
    images = iter(sample.images)
    turns = [
        (turn["role"], *(next(images).width if p["type"] == "image" else p["text"] for p in turn["content"]))
        for turn in sample.conversation()
    ]
    assert next(images, None) is None
    return turns


def film(file: Path, frames: int, fps: float = 8.0) -> Path:
    """Write a video of 84x56 pixels whose frames become brighter, as MPEG-4."""
    import cv2

    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"mp4v"), fps, (84, 56))
    for number in range(frames):
        pixels = np.full((56, 84, 3), 20 + 200 * number // frames, np.uint8)
        pixels[:, : 1 + number % 80] //= 2
        writer.write(pixels)
    writer.release()
    return file


def refused(call: Callable, *expected: str) -> None:
    """`call` raises a `UserError` of one line that contains all of `says`."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for text in expected:
        assert text in message, message

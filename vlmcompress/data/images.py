"""Open an image from an untrusted file or bytes as 8-bit RGB.

What a viewer would show is what the model gets: EXIF rotation is applied, transparency is laid on white; palettes,
CMYK, grayscale and 16 bits per channel are converted (Pillow clips 16-bit gray to white where it should scale). An
animation gives its first frame. The size in the header is checked before any pixel is decoded, so a decompression bomb
costs nothing. Whatever cannot be decoded is a `UserError` that names the image: leaving it out would change the data.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload
from urllib.parse import unquote, unquote_to_bytes, urlparse

import numpy as np
from PIL import Image, ImageOps

from vlmcompress.common import json_files
from vlmcompress.common.hub import IMAGES
from vlmcompress.common.messages import reason
from vlmcompress.errors import UserError

MAX_PIXELS = 178_956_970  # the number at which Pillow, by default, refuses
MAX_BYTES = 1 << 30
"""The most bytes in an image's file: what the pixels of the largest image take with 16 bits per channel."""
SUFFIXES = frozenset(IMAGES)
_PILLOW_LIMIT = threading.Lock()


class LazyImages(Sequence[Image.Image]):
    """Images that are decoded each time they are asked for, so that a list of samples stays as small as their files.

    Args:
        sources: encoded bytes or a path, per image.
        origin: where the images were named, e.g. `data.jsonl row 3`; error messages begin with it.
    """

    def __init__(self, sources: Sequence[bytes | Path], origin: str, max_pixels: int = MAX_PIXELS):
        self._sources = tuple(sources)
        self._origin = origin
        self._max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...
    @overload
    def __getitem__(self, index: slice) -> list[Image.Image]: ...
    def __getitem__(self, index: int | slice) -> Image.Image | list[Image.Image]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source = self._sources[index]
        number = f", image {range(len(self))[index] + 1}" if len(self) > 1 else ""
        return open_image(source, f"{self._origin}{number}", self._max_pixels)


def open_image(source: bytes | Path, origin: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode one image to RGB.

    Args:
        source: encoded bytes, or the path of a file.
        origin: what error messages call it.
        max_pixels: refuse an image whose header says it has more.
    """
    what = f"{origin}: image" if isinstance(source, bytes) else f"{origin}: image '{source}'"
    data = source if isinstance(source, bytes) else _read(source, what)
    if not data:
        raise UserError(f"{what} is empty (0 bytes); replace the file or drop the row")
    try:
        with _no_pillow_limit():
            image = Image.open(io.BytesIO(data))
    except Exception as error:  # decoders raise anything on damaged data
        raise UserError(f"{what} is not an image that Pillow can read; convert it to PNG or drop the row") from error
    width, height = image.size
    if width * height > max_pixels:
        raise UserError(
            f"{what} has {width}x{height} = {width * height / 1e6:.0f} Mpx, more than the {max_pixels / 1e6:.0f} Mpx "
            "allowed; shrink it or drop the row"
        )
    try:
        with image, _no_pillow_limit():
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:
        raise UserError(f"{what} cannot be decoded ({reason(error)}); replace the file or drop the row") from error


def from_reference(text: str, folder: Path, origin: str) -> bytes | Path:
    """Read what an image column or `image_url` names: a path (relative to `folder`, or absolute), `data:` or `file:` URI."""
    scheme = text.partition(":")[0].lower() if ":" in text[:8] else ""
    if scheme in ("http", "https"):
        raise UserError(f"{origin}: image is a web address ({text[:80]}), and nothing is downloaded; save it to a file")
    if scheme == "data":
        return _data_uri(text, origin)
    if scheme == "file":
        text = unquote(urlparse(text).path)
    path = folder / text
    if "\0" in text or not path.exists():
        raise UserError(f"{origin}: image '{text[:200]}' not found; relative paths start at {folder}")
    return path


def _data_uri(uri: str, origin: str) -> bytes:
    """Decode the bytes of a URI such as `data:image/png;base64,....`"""
    header, comma, body = uri.partition(",")
    try:
        if not comma:
            raise ValueError("no comma")
        return base64.b64decode(unquote(body), validate=True) if "base64" in header else unquote_to_bytes(body)
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{origin}: image has a malformed data: URI ({error}); encode the file with base64") from error


def _read(path: Path, what: str) -> bytes:
    try:
        return json_files.read_bytes(path, MAX_BYTES)
    except json_files.Unreadable as error:
        raise UserError(f"{what} cannot be read: {error}; give an image file") from error
    except OSError as error:
        raise UserError(f"{what} cannot be read ({error.strerror}); check the path and its permissions") from error


@contextlib.contextmanager
def _no_pillow_limit() -> Iterator[None]:
    """Lift Pillow's process-wide pixel limit, as each call checks its own `max_pixels`."""
    with _PILLOW_LIMIT:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # more than 8 bits per pixel in one channel
        full = 65535.0 if image.mode.startswith("I;16") else None
        return Image.fromarray(_to_8_bit(np.asarray(image).astype(np.float64), full)).convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _to_8_bit(values: np.ndarray, full: float | None) -> np.ndarray:
    """Scale gray values [height, width] to uint8. `full` becomes white; None: the smallest of 1, 255, 65535 that holds all."""
    if not np.isfinite(values).all():
        raise ValueError("it has NaN or infinite pixels")
    if full is None:
        top = values.max(initial=0.0)
        limits = (1.0, 255.0, 65535.0) if (values % 1).any() else (255.0, 65535.0)
        full = next((limit for limit in limits if top <= limit), top)
    return np.clip(np.rint(values * (255.0 / full)), 0, 255).astype(np.uint8)

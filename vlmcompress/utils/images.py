"""Which image files are opened: raster formats that Pillow decodes itself, whatever a file is called.

Pillow also opens EPS, by running Ghostscript, and formats of other programs; an image of a stranger must not start one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from PIL import Image

FORMATS: dict[str, tuple[str, ...]] = {
    "JPEG": (".jpg", ".jpeg", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
    "JPEG2000": (".jp2",),
    "AVIF": (".avif",),
}
"""Pillow's name of a format -> the suffixes of its files."""
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)


def open_raster(file: Path | BinaryIO) -> Image.Image:
    """Open an image in one of `FORMATS`; pixels are decoded later. Raises as `PIL.Image.open`."""
    from PIL import Image

    Image.init()  # AVIF, WebP and JPEG 2000 depend on Pillow's build
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])

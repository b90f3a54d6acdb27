"""Images of every kind that users have. Oracle: the pixels that were written, converted by hand with NumPy."""

from __future__ import annotations

import base64
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.kit.pictures import file_of, picture, refused
from vlmcompress.models.data.samples import LazyImages, from_reference, open_image
from vlmcompress.utils.errors import UserError


def pixels(data: bytes) -> np.ndarray:
    image = open_image(data, "row 1")
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def test_rgb_is_unchanged():
    assert (pixels(file_of(picture())) == np.asarray(picture())).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation):
    """Oracle: the eight orientations written out as NumPy flips and turns, from the EXIF standard's table."""
    stored = np.asarray(picture())
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(stored, 1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    rotated = pixels(file_of(picture(), exif=exif))
    assert rotated.shape == upright.shape and (rotated == upright).all()


def test_transparency_lies_on_white():
    """Oracle: c * a + 255 * (1 - a)."""
    rgba = np.random.default_rng(1).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    alpha = rgba[..., 3:] / 255
    expected = rgba[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(pixels(file_of(Image.fromarray(rgba))) - expected).max() <= 1
    gray = Image.fromarray(rgba[..., 0]).convert("LA")
    gray.putalpha(Image.fromarray(rgba[..., 3]))
    expected = (rgba[..., :1] * alpha + 255 * (1 - alpha)).repeat(3, axis=2)
    assert np.abs(pixels(file_of(gray)) - expected).max() <= 1


def test_palette_with_and_without_a_transparent_entry():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    assert pixels(file_of(image)).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    assert pixels(file_of(image, transparency=1)).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    assert pixels(file_of(image, "GIF")).tolist() == [[[255, 0, 0], [0, 0, 255]]]


def test_colour_that_means_transparent():
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    assert pixels(file_of(image, transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [9, 9, 9]]]


def test_cmyk_jpeg():
    """Oracle: without black, the colour is 255 minus ink."""
    decoded = pixels(file_of(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=100))
    assert np.abs(decoded - [0, 255, 255]).max() <= 3


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_gray_is_scaled_not_clipped(kind):
    values = np.array([[0, 257, 25700, 65535]], dtype=np.uint16)
    assert pixels(file_of(Image.fromarray(values), kind))[0, :, 0].tolist() == [0, 1, 100, 255]


@pytest.mark.parametrize(("values", "expected"), [([0, 0.5, 1], [0, 128, 255]), ([0, 100, 255], [0, 100, 255])])
def test_float_gray(values, expected):
    image = Image.fromarray(np.array([values], dtype=np.float32))
    assert pixels(file_of(image, "TIFF"))[0, :, 1].tolist() == expected


def test_nan_pixels_are_refused():
    image = Image.fromarray(np.full((2, 2), np.nan, dtype=np.float32))
    refused(lambda: open_image(file_of(image, "TIFF"), "row 1"), "row 1", "NaN")


@pytest.mark.parametrize("mode", ["1", "L", "YCbCr", "HSV", "LAB"])
def test_other_modes_become_rgb(mode):
    kind = "TIFF" if mode in ("YCbCr", "LAB") else "PNG"
    image = Image.new(mode, (3, 2))
    assert pixels(file_of(image if mode != "HSV" else image.convert("RGB"), kind)).shape == (2, 3, 3)


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_truncated_file_is_refused(kind):
    data = file_of(picture(200, 200), kind)
    refused(lambda: open_image(data[: len(data) * 2 // 3], "data.jsonl line 7"), "data.jsonl line 7", "drop the row")


def test_damaged_everywhere_never_crashes():
    """Any single broken byte gives an image or a `UserError`, nothing else."""
    data = bytearray(file_of(picture(20, 20)))
    for position in range(0, len(data), 13):
        broken = bytes(data[:position]) + bytes([data[position] ^ 0xFF]) + bytes(data[position + 1 :])
        try:
            open_image(broken, "row 1")
        except Exception as error:
            assert isinstance(error, UserError), position


def test_decompression_bomb_is_refused_by_its_header():
    """A PNG of 60000 x 60000 in some hundred bytes; decoding it would take 10 GB."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    refused(lambda: open_image(bomb, "row 1"), "row 1", "is too large", "shrink")


def test_an_image_starts_no_program(tmp_path, monkeypatch):
    """EPS is a program for Ghostscript, which Pillow looks for when it opens one, under whatever name."""
    started = tmp_path / "started"
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    file = tmp_path / "photo.png"
    file.write_bytes(file_of(picture(), "EPS"))
    refused(lambda: open_image(file, "row 1"), "photo.png", "not an image in one of JPEG, PNG")
    assert not started.exists()


def test_files(tmp_path, photo):
    assert open_image(photo, "row 1").size == (60, 40)
    (tmp_path / "empty.png").touch()
    refused(lambda: open_image(tmp_path / "empty.png", "row 1"), "empty.png", "0 bytes")
    (tmp_path / "text.png").write_text("hello")
    refused(lambda: open_image(tmp_path / "text.png", "row 1"), "text.png", "not an image")
    refused(lambda: open_image(tmp_path, "row 1"), "cannot be read")
    refused(lambda: open_image(b"", "row 1"), "row 1", "0 bytes")


def test_references(tmp_path, photo):
    data = photo.read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    assert from_reference("photo.png", tmp_path, "row 1") == photo
    assert from_reference(str(photo), tmp_path / "elsewhere", "row 1") == photo
    assert from_reference(photo.as_uri(), tmp_path, "row 1") == photo
    assert from_reference(uri, tmp_path, "row 1") == data
    refused(lambda: from_reference("https://example.org/a.png", tmp_path, "row 1"), "row 1", "nothing is downloaded")
    refused(lambda: from_reference("data:image/png;base64,@@", tmp_path, "row 1"), "row 1", "malformed")
    refused(lambda: from_reference("other.png", tmp_path, "row 1"), "'other.png' not found", str(tmp_path))


def test_lazy_images_name_the_broken_one():
    images = LazyImages([file_of(picture()), b"junk"], "row 4")
    assert len(images) == 2 and images[0].size == (60, 40) and images[:1][0].size == (60, 40)
    refused(lambda: images[1], "row 4, image 2")
    refused(lambda: list(images), "row 4, image 2")

"""Questions that an engine and transformers are asked: about small images, of four kinds, and about images of real sizes."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from vlmcompress import models
from vlmcompress.engines import Request
from vlmcompress.evaluation.accuracy.grounding import region
from vlmcompress.models.data.sources import PROMPTS, load_samples
from vlmcompress.utils.errors import UserError

KINDS = ("one image", "two images", "image after text", "text only")
SIZES = ((224, 224), (320, 160), (144, 144), (160, 288), (448, 336))
TALL = (64, 8960)  # size that gives over 256 rows of two columns in families with M-RoPE
SEVERAL = "several"
REAL = ("3840x2160", "1792x2560", "1080x608", "64x8960", SEVERAL)
"""Sizes of large images, in pixels, and several of them in a prompt (`TOGETHER`)."""
DEFAULT = ("1920x1080",)
TOGETHER = ((1080, 608), (448, 320), (320, 640))
SCALED = (
    " scaled before"  # suffix of the id of a question about an image that has the size to which processors scale it
)
LONGEST = 20_000  # of a side, in pixels
BOX = "Where is the {} rectangle? Answer with its bounding box, as [x1, y1, x2, y2]."
BOX_TOKENS = 64  # of an answer that is a box
COLOURS = ("black", "white", "red", "green", "blue", "yellow", "orange", "purple")


def make_questions(media: Path, count: int, data: Path | None, seed: int) -> list[Request]:
    """Write images to `media` and make `count` questions about them, of the four `KINDS` in turn.

    Args:
        data: data set to take images and questions from (see `load_samples`); None: draw images.

    Raises:
        UserError: fewer questions than kinds, or than samples with images.
    """
    if count < len(KINDS):
        raise UserError(f"--prompts is {count}; take at least {len(KINDS)}, one of each kind")
    chance, pairs = random.Random(seed), list[tuple[dict[str, Any], dict[str, Any]]]()
    lengths: list[int | None] = [None] * count
    if data:
        for number, sample in enumerate(_with_images(data, count, seed)):
            pairs.append((_image(sample.images[0], media / f"{number}.png"), _text(sample.question)))
            lengths[number] = _length(sample)
    else:
        for number in range(count):
            picture = _image(_drawn(chance, SIZES[number % len(SIZES)])[0], media / f"{number}.png")
            pairs.append((picture, _text(PROMPTS[number % len(PROMPTS)])))
    requests = []
    for number, (picture, words) in enumerate(pairs):
        kind = KINDS[number % len(KINDS)]
        parts = {
            "one image": [picture, words],
            "two images": [picture, pairs[(number + 1) % count][0], words],
            "image after text": [words, picture],
            "text only": [words],
        }
        requests.append(Request(f"{number} ({kind})", [{"role": "user", "content": parts[kind]}], lengths[number]))
    return requests


def _with_images(data: Path, count: int, seed: int) -> list[Any]:
    """`count` samples with images."""
    samples: list[Any] = []
    for most in (2 * count, None):  # some may have no image
        samples = [sample for sample in load_samples(data, samples=most, seed=seed) if sample.images][:count]
        if len(samples) == count:
            return samples
    raise UserError(f"{data} has {len(samples)} samples with images; give more, or --prompts {len(samples)}")


def _length(sample: Any) -> int | None:
    """Tokens of the answer to a question for a box or point; None: as for the others."""
    return BOX_TOKENS if sample.answer and region(sample.answer) else None


def read_sizes(text: str) -> tuple[str, ...]:
    """The sizes that `--sizes` names: `WIDTHxHEIGHT` and `several`, separated by commas, or `all` or `none`.

    Raises:
        UserError: one is none of these, or a side is longer than 20,000 pixels.
    """
    if text in ("all", "none"):
        return REAL if text == "all" else ()
    for size in (sizes := tuple(text.split(","))):
        sides = re.fullmatch(r"(\d{1,5})x(\d{1,5})", size)
        if size != SEVERAL and not (sides and all(1 <= int(side) <= LONGEST for side in sides.groups())):
            raise UserError(
                f"--sizes has '{size}'; write pixels as 3840x2160 (to {LONGEST:,} a side), {SEVERAL}, all or none"
            )
    return sizes


def sized_questions(
    media: Path, sizes: Sequence[str], data: Path | None, seed: int, scaled: Path | None = None
) -> list[Request]:
    """Write large images to `media` and make a question about each of `sizes`, its id.

    Args:
        data: data set whose first image is stretched to each size, for its own question; None: draw images.
        scaled: a checkpoint; each image is also asked about as its processor scales it, under the id with `SCALED`, unless that
            cuts it into tiles.
    """
    chance, requests = random.Random(seed), list[Request]()
    sample = _with_images(data, 1, seed)[0] if data and sizes else None

    def add(name: str, images: Sequence[Image.Image], colour: str) -> None:
        question = (sample.question, _length(sample)) if sample else (BOX.format(colour), BOX_TOKENS)
        words, length = _text(question[0]), question[1]
        parts = [_image(image, media / f"{name.replace(' ', '-')}-{at}.png") for at, image in enumerate(images)]
        requests.append(Request(name, [{"role": "user", "content": [*parts, words]}], length))

    for name in sizes:
        width, _, height = name.partition("x")
        pixels = TOGETHER if name == SEVERAL else ((int(width), int(height)),)
        images, colour = [], ""
        for size in pixels:
            image, colour = _drawn(chance, size)
            images.append(sample.images[0].resize(size, Image.Resampling.BICUBIC) if sample else image)
        add(name, images, colour)
        if scaled and name != SEVERAL and (smaller := scaled_size(scaled, *pixels[0])) and smaller != pixels[0]:
            add(name + SCALED, [images[0].resize(smaller, Image.Resampling.BICUBIC)], colour)
    return requests


def scaled_size(folder: Path, width: int, height: int) -> tuple[int, int] | None:
    """The size nearest to an image's, in pixels, that a checkpoint's processor leaves as it is; None where it cuts images
    into tiles, or refuses that size."""
    spec, processor = models.spec_for(models.read_config(folder)), models.load_processor(folder)
    images_of, merge = processor.image_processor, getattr(processor, "spatial_merge_size", None)  # Mistral 3
    patch = processor.patch_size if merge else _setting(images_of, "patch_size", "encoder_patch_size")
    merge = merge or _setting(images_of, "merge_size", "pooling_kernel_size", "downsample_factor")
    for _ in range(8):  # Gemma 4 scales what it has rounded down once more
        try:
            pieces = spec.layout(processor, width, height, 1).pieces
        except ValueError:
            return None
        if len(pieces) != 1:
            return None
        if patch and merge:
            size = pieces[0].columns * patch * merge, pieces[0].rows * patch * merge
        elif getattr(square := _setting(images_of, "crop_size", "size"), "height", None):
            size = square.width, square.height
        else:
            return None
        if max(size) > 200 * min(size):  # Qwen's processors refuse longer ones
            return None
        if size == (width, height):
            break
        width, height = size
    return size


def _setting(images_of: Any, *names: str) -> Any:
    """What an image processor has under the first of these names that it has."""
    return next((value for name in names if (value := getattr(images_of, name, None))), None)


def vllm_questions(media: Path, first: Request, tall: bool, seed: int) -> list[Request]:
    """A second turn after the first question, and an image at positions beyond 256, where bfloat16 cannot represent odd
    ones."""
    turns = [
        *first.messages,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [_text(PROMPTS[-1])]},
    ]
    picture = _image(_drawn(random.Random(seed), TALL if tall else SIZES[0])[0], media / "far.png")
    far = [_text(" ".join(map(str, range(300)))), picture, _text(PROMPTS[0])]
    return [Request("second turn", turns), Request("far image", [{"role": "user", "content": far}])]


def _drawn(chance: random.Random, size: tuple[int, int]) -> tuple[Image.Image, str]:
    """Draw coloured boxes on coarse noise, so that no two parts are the same; also the colour of the topmost box."""
    cells = (max(2, size[0] // 16), max(2, size[1] // 16))
    noise = Image.frombytes("RGB", cells, chance.randbytes(3 * cells[0] * cells[1]))
    image = noise.resize(size, Image.Resampling.NEAREST)
    pen, colours = ImageDraw.Draw(image), chance.sample(COLOURS, 4)
    for colour in colours:
        left, top = chance.randrange(size[0] * 3 // 4), chance.randrange(size[1] * 3 // 4)
        pen.rectangle((left, top, left + size[0] // 4, top + size[1] // 4), fill=colour)
    return image, colours[-1]


def _image(image: Image.Image, file: Path) -> dict[str, Any]:
    """The part of a message that shows an image, which is written to a file."""
    image.convert("RGB").save(file, compress_level=1)
    return {"type": "image_url", "image_url": {"url": file.resolve().as_uri()}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}

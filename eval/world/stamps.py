"""Alpha masks (uint8, 0..255) of everything that can be drawn, each rendered once and cached."""

from functools import cache, lru_cache
from math import cos, pi, sin

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits

from .vocab import SPLITS

_SUPERSAMPLE = 4


def _levels(mask: np.ndarray, steps: int) -> np.ndarray:
    """Quantize an alpha mask, so that PNG files of drawn images stay small."""
    return (np.round(mask.astype(np.float32) / 255 * steps) * (255 / steps)).astype(np.uint8)


def _star(n: float) -> list[tuple[float, float]]:
    """Corners of a five-pointed star in an n x n box."""
    half = n / 2
    points = []
    for k in range(10):
        radius = half if k % 2 == 0 else half * 0.42
        angle = -pi / 2 + k * pi / 5
        points.append((half + radius * cos(angle), half + radius * sin(angle)))
    return points


@cache
def shape(name: str, size: int) -> np.ndarray:
    """Mask of a coloured shape in a size x size box."""
    n = size * _SUPERSAMPLE
    image = Image.new("L", (n, n), 0)
    draw = ImageDraw.Draw(image)
    if name == "circle":
        draw.ellipse((0, 0, n - 1, n - 1), fill=255)
    elif name == "ring":
        draw.ellipse((0, 0, n - 1, n - 1), fill=255)
        draw.ellipse((n * 0.3, n * 0.3, n * 0.7, n * 0.7), fill=0)
    elif name == "square":
        draw.rectangle((n * 0.06, n * 0.06, n * 0.94, n * 0.94), fill=255)
    elif name == "triangle":
        draw.polygon([(n / 2, 0), (n - 1, n - 1), (0, n - 1)], fill=255)
    elif name == "cross":
        draw.rectangle((n * 0.34, 0, n * 0.66, n - 1), fill=255)
        draw.rectangle((0, n * 0.34, n - 1, n * 0.66), fill=255)
    elif name == "star":
        draw.polygon(_star(n), fill=255)
    else:
        raise ValueError(f"no such shape: {name}")
    return _levels(np.asarray(image.resize((size, size), Image.Resampling.BOX)), 4)


@lru_cache(maxsize=1)
def _digit_data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels and the fixed shuffled order of scikit-learn's handwritten digits."""
    data = load_digits()
    return data.images, data.target, np.random.RandomState(7).permutation(len(data.target))


@cache
def digit_pool(split: str) -> dict[int, tuple[int, ...]]:
    """Indices into scikit-learn's digits that a split may use, by label; no index is in two splits."""
    _, target, order = _digit_data()
    _, first, last = SPLITS[split]
    pool: dict[int, list[int]] = {d: [] for d in range(10)}
    for index in order[first:last]:
        pool[int(target[index])].append(int(index))
    return {label: tuple(members) for label, members in pool.items()}


@cache
def handwritten(index: int, size: int) -> np.ndarray:
    """Mask of one handwritten digit, scaled up from its 8x8 original."""
    images, _, _ = _digit_data()
    image = Image.fromarray((images[index] * (255 / 16)).astype(np.uint8))
    return _levels(np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)), 6)


@cache
def letter(char: str, size: int = 17) -> np.ndarray:
    """Mask of one rendered letter, cropped to its ink; about a visual token in size."""
    font = ImageFont.load_default(size)
    image = Image.new("L", (2 * size, 2 * size), 0)
    ImageDraw.Draw(image).text((size // 2, size // 3), char, fill=255, font=font)
    return _levels(np.asarray(image.crop(image.getbbox())), 4)

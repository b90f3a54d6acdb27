"""Calibration data of small random images, one question and answer each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def write(
    folder: Path,
    count: int,
    image: Callable[[int], str | list[str]] = "{}.png".format,
    side: int = 56,
    kinds: int | None = None,
) -> Path:
    """`calib.jsonl` in `folder` with `count` rows, and as many images of `side` pixels; `image` gives what row i shows.

    `kinds`: there are only so many kinds of image, and those of a kind differ in one pixel; None: all are of their own.
    """
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (side, side, 3), np.uint8) for _ in range(kinds or count)]
    with (folder / "calib.jsonl").open("w") as file:
        for i in range(count):
            pixels = noise[i % len(noise)].copy()
            if kinds:
                pixels[0, 0] = i
            Image.fromarray(pixels).save(folder / f"{i}.png")
            row = {"id": str(i), "image": image(i), "question": "what is it", "answer": "red"}
            file.write(json.dumps(row) + "\n")
    return folder / "calib.jsonl"

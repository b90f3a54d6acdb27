"""Calibration data of small random images, one question and answer each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def write(folder: Path, count: int, image: Callable[[int], str | list[str]] = "{}.png".format, side: int = 56) -> Path:
    """`calib.jsonl` in `folder` with `count` rows, and as many images of `side` pixels; `image` says what row i shows."""
    random = np.random.default_rng(0)
    with (folder / "calib.jsonl").open("w") as file:
        for i in range(count):
            Image.fromarray(random.integers(0, 256, (side, side, 3), np.uint8)).save(folder / f"{i}.png")
            row = {"id": str(i), "image": image(i), "question": "what is it", "answer": "red"}
            file.write(json.dumps(row) + "\n")
    return folder / "calib.jsonl"

"""Rows of a split: images as PNG bytes, question, answer, family; and the sampling of images for a family."""

import io
from collections.abc import Iterator
from itertools import count
from random import Random

import numpy as np
from PIL import Image

from .chart import Chart, sample_chart
from .questions import ASKERS
from .scene import Scene, sample_scene
from .textual import ask_text
from .vocab import DEFAULT_GRID, FAMILIES, QWEN_GRIDS, SPLITS

VARIANTS = {"llava": (DEFAULT_GRID,), "qwen": QWEN_GRIDS}
QUESTIONS_PER_IMAGE = 4
PER_FAMILY = {"calibration": 30, "validation": 90, "test": 250}
View = Scene | Chart | tuple[Scene, Scene]


def sample_view(rng: Random, family: str, grid: tuple[int, int], split: str) -> View:
    """The image, or the pair of images, that a family asks about."""
    if family == "chart":
        return sample_chart(rng)
    if family != "two_images":
        return sample_scene(rng, grid, split)
    pair = sample_scene(rng, grid, split), sample_scene(rng, grid, split)
    if rng.random() < 0.35:  # otherwise two backgrounds are rarely the same
        pair[1].background = pair[0].background
    return pair


def images_of(view: View | None) -> tuple[Scene | Chart, ...]:
    """The images of a view, in order; none for a text-only question."""
    if view is None:
        return ()
    return view if isinstance(view, tuple) else (view,)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def ask_several(rng: Random, view: View, family: str, count: int) -> list[tuple[str, str]]:
    """Up to ``count`` different questions of a family about one view."""
    answers: dict[str, str] = {}
    for _ in range(4 * count):
        if len(answers) == count:
            break
        if (turn := ASKERS[family](rng, view)) is not None:
            answers.setdefault(*turn)
    return list(answers.items())


def asked_views(split: str, family: str, variant: str) -> Iterator[tuple[View | None, list[tuple[str, str]]]]:
    """Views of a family with questions and answers, in a fixed order: a pure function of the arguments."""
    base = SPLITS[split][0] + 100_000 * FAMILIES.index(family) + 50_000 * list(VARIANTS).index(variant)
    for attempt in count():
        rng = Random(base + attempt)
        if family == "text":
            yield None, [ask_text(rng)]
            continue
        grids = VARIANTS[variant]
        grid = grids[0] if rng.random() < 0.4 else rng.choice(grids)
        view = sample_view(rng, family, grid, split)
        if turns := ask_several(rng, view, family, QUESTIONS_PER_IMAGE):
            yield view, turns


def family_rows(split: str, family: str, variant: str, number: int) -> list[dict]:
    """The first ``number`` rows of one family."""
    rows: list[dict] = []
    for view, turns in asked_views(split, family, variant):
        images = [png(image.draw()[0]) for image in images_of(view)]
        for question, answer in turns[: number - len(rows)]:
            name = f"{split}-{variant}-{family}-{len(rows):04d}"
            rows.append({"id": name, "image": images, "question": question, "answer": answer, "family": family})
        if len(rows) == number:
            return rows
    raise AssertionError("asked_views does not end")


def split_rows(split: str, variant: str) -> list[dict]:
    """All rows of a frozen split, families interleaved so that any prefix is balanced."""
    by_family = [family_rows(split, family, variant, PER_FAMILY[split]) for family in FAMILIES]
    return [row for together in zip(*by_family, strict=True) for row in together]

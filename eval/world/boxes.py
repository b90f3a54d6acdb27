"""Boxes and points of things in scenes: two families next to the frozen ones, whose answers are coordinates.

    Give the box of the red star.    [.10,.06,.25,.31]     left, top, right, bottom
    Point at the digit 7.            [.17,.18]             the box's middle

Coordinates are shares of the image's width and height, to a hundredth: patches of the demos are larger than that. Small shapes
are hardly larger than a visual token, and a box that is 4 pixels off has an IoU below a half, so that only points are asked.
The frozen splits do not hold these families.
"""

from collections.abc import Iterator
from itertools import count
from random import Random

import numpy as np

from .rows import VARIANTS, png
from .scene import Scene, sample_scene, stamp, stamp_corner
from .vocab import SPLITS

QUESTIONS = {"box": "Give the box of the {}.", "point": "Point at the {}."}
_BASE = 80_000_000  # of seeds, between those of the frozen families and of descriptions

Box = tuple[int, int, int, int]


def box_of(scene: Scene, row: int, column: int) -> Box:
    """The smallest box (left, top, right, bottom) of pixels that a shape or digit is drawn on, in hundredths of the image."""
    drawn = np.argwhere(stamp(scene.at(row, column)) > 0)
    corner = np.asarray(stamp_corner(scene, row, column))
    top, left = corner + drawn.min(0)
    bottom, right = corner + drawn.max(0) + 1
    height, width = scene.size()
    return tuple(min(99, round(100 * v)) for v in (left / width, top / height, right / width, bottom / height))


def things(scene: Scene) -> dict[str, tuple[int, int]]:
    """Name -> place of the shapes and digits that one name fits: "red star", "digit 7"."""
    places: dict[str, list[tuple[int, int]]] = {}
    for kind in ("shape", "digit"):
        for place in scene.places(kind=kind):
            cell = scene.at(*place)
            places.setdefault(f"{cell.colour} {cell.name}" if kind == "shape" else f"digit {cell.name}", []).append(
                place
            )
    return {name: spots[0] for name, spots in places.items() if len(spots) == 1}


def written(numbers: tuple[int, ...]) -> str:
    """Coordinates as an answer."""
    return f"[{','.join(f'.{number:02d}' for number in numbers)}]"


def asked_boxes(split: str, variant: str) -> Iterator[tuple[Scene, list[tuple[str, str, Box, str]]]]:
    """Scenes with all questions, in random order, each with answer, box and family; without end, by the arguments alone."""
    for number in count():
        rng = Random(_BASE + SPLITS[split][0] + number)
        scene = sample_scene(rng, rng.choice(VARIANTS[variant]), split)
        turns = []
        for name, place in sorted(things(scene).items()):
            left, top, right, bottom = box = box_of(scene, *place)
            if scene.at(*place).large:
                turns.append((QUESTIONS["box"].format(name), written(box), box, "box"))
            middle = (left + right) // 2, (top + bottom) // 2
            turns.append((QUESTIONS["point"].format(name), written(middle), box, "point"))
        if turns:
            rng.shuffle(turns)
            yield scene, turns


def box_rows(split: str, variant: str, number: int) -> list[dict]:
    """The first `number` rows, as those of frozen families, boxes and points in turn; `answer` is the thing's box, always."""
    rows: list[dict] = []
    for scene, turns in asked_boxes(split, variant):
        if len(rows) == number:
            return rows
        family = ("box", "point")[len(rows) % 2]
        if turn := next((turn for turn in turns if turn[3] == family), None):
            question, _, box, _ = turn
            image = png(scene.draw()[0])
            name = f"{split}-{variant}-{family}-{len(rows):04d}"
            rows.append({"id": name, "image": [image], "question": question, "answer": written(box), "family": family})
    raise AssertionError("asked_boxes does not end")

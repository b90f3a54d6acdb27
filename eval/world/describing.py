"""Descriptions of scenes in 30 to 60 words: a family next to the frozen ones, whose answers are long enough to time decoding.

A grammar makes the text from the scene, row by row or column by column as the question says:

    The background is pink. Row 1 has a red star, a digit 7, the text A C E. Row 2 has ... There are 4 shapes, 2 digits.

The frozen splits do not hold it, and their figures stay what they are.
"""

from collections.abc import Iterator
from itertools import count
from random import Random

from .rows import VARIANTS, png
from .scene import Cell, Scene, sample_scene
from .vocab import SPLITS

WORDS = 30, 60
QUESTIONS = {"row": "Describe the image row by row.", "column": "Describe the image column by column."}
_BASE = 90_000_000  # of seeds, above those of all frozen families


def described(scene: Scene, lines: str) -> str:
    """The description of a scene by its `lines`, "row" or "column"."""
    rows = [[scene.at(r, c) for c in range(scene.columns)] for r in range(scene.rows)]
    groups = rows if lines == "row" else list(zip(*rows, strict=True))
    sentences = [f"The background is {scene.background}."]
    sentences += [f"{lines.capitalize()} {k} has {', '.join(map(thing, group))}." for k, group in enumerate(groups, 1)]
    tallies = (len(scene.places(kind=kind)) for kind in ("shape", "digit"))
    return " ".join([*sentences, "There are {} shapes, {} digits.".format(*tallies)])


def thing(cell: Cell) -> str:
    """What is in a cell, as a part of a sentence."""
    if cell.kind == "shape":
        return f"a {cell.colour} {cell.name}"
    if cell.kind == "digit":
        return f"a digit {cell.name}"
    return f"the text {' '.join(cell.name)}" if cell.kind == "text" else "nothing"


def descriptions(split: str, variant: str) -> Iterator[tuple[Scene, str, str]]:
    """Scenes with a question and its answer, without end: a function of the arguments alone."""
    low, high = WORDS
    for number in count():
        rng = Random(_BASE + SPLITS[split][0] + number)
        scene = sample_scene(rng, rng.choice(VARIANTS[variant]), split)
        lines = rng.choice(tuple(QUESTIONS))
        answer = described(scene, lines)
        if low <= len(answer.split()) <= high:
            yield scene, QUESTIONS[lines], answer


def description_rows(split: str, variant: str, number: int) -> list[dict]:
    """The first `number` rows, as those of frozen families (`rows.family_rows`)."""
    rows = []
    for scene, question, answer in descriptions(split, variant):
        if len(rows) == number:
            return rows
        name = f"{split}-{variant}-describe-{len(rows):04d}"
        image = png(scene.draw()[0])
        rows.append({"id": name, "image": [image], "question": question, "answer": answer, "family": "describe"})
    raise AssertionError("descriptions does not end")

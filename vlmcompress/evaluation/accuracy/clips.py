"""Short clips for the suite `clips`, drawn here and not downloaded.

    question, answer = question_answer("times", 7)     "How many times does the red circle appear? Answer with a number.", "3"
    frames("times", 7)                       16 images of 224 x 224 pixels

A clip asks what moved where, how many times, or what came first. No single frame tells: the answer is in their order, which a
reducer of videos may lose. Things stay for two frames at least, as Qwen's towers make tokens of pairs of frames.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from vlmcompress.evaluation.accuracy.scoring import NUMBERS
from vlmcompress.models.data.video import LazyFrames, Video

FAMILIES = {"moved": 80, "times": 80, "first": 80}
"""Family -> number of clips."""
FRAMES, SIDE, SIZE = 16, 224, 44
COLOURS = {"red": (214, 40, 40), "green": (44, 160, 60), "blue": (40, 84, 214), "orange": (242, 132, 24)}
SHAPES = ("circle", "square", "triangle")
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
WORDS = {**NUMBERS, "once": "1", "twice": "2"}
Place = tuple[float, float]


def draw(family: str, number: int) -> tuple[str, str, list[str], dict[str, list[Place | None]]]:
    """Draw a clip: question, answer, choices, and of each thing its place in each frame, None where it is not there."""
    rng = Random(f"{family} {number}")
    things = [f"{colour} {rng.choice(SHAPES)}" for colour in rng.sample(sorted(COLOURS), 3)]
    corners = rng.sample([(x, y) for x in (50, 112, 174) for y in (50, 112, 174)], 3)
    places: dict[str, list[Place | None]] = {
        thing: [corner] * FRAMES for thing, corner in zip(things, corners, strict=True)
    }
    if family == "moved":
        way = rng.choice(sorted(WAYS))
        start, (across, down) = rng.uniform(-20, 20), WAYS[way]
        path = [(step / (FRAMES - 1) - 0.5) * 150 for step in range(FRAMES)]
        places = {things[0]: [(112 + across * s + down * start, 112 + down * s + across * start) for s in path]}
        places |= {thing: [(32, y)] * FRAMES for thing, y in zip(things[1:], (32, 192), strict=True)}
        return (
            f"Which way does the {things[0]} move: left, right, up or down? Answer in one word.",
            way,
            [*WAYS],
            places,
        )
    if family == "times":
        times = rng.randint(1, 4)
        starts = sorted(rng.sample(range(4), times))
        visible = {4 * start + offset for start in starts for offset in range(2)}
        places[things[0]] = [corners[0] if frame in visible else None for frame in range(FRAMES)]
        question = f"How many times does the {things[0]} appear? Answer with a number."
        return question, str(times), ["1", "2", "3", "4"], places
    order = rng.sample(things, 3)
    for turn, thing in enumerate(order):
        places[thing] = [place if frame >= 2 + 4 * turn else None for frame, place in enumerate(places[thing])]
    return f"Which thing appears first: the {', the '.join(things[:2])} or the {things[2]}?", order[0], things, places


def question_answer(family: str, number: int) -> tuple[str, str]:
    """The question about a clip, and its answer."""
    return draw(family, number)[:2]


def frames(family: str, number: int) -> list[Image.Image]:
    """The frames of a clip, in RGB."""
    *_, places = draw(family, number)
    paper = tuple(Random(f"look of {family} {number}").randint(215, 250) for _ in range(3))
    images = []
    for frame in range(FRAMES):
        image = Image.new("RGB", (SIDE, SIDE), paper)
        pen, r = ImageDraw.Draw(image), SIZE // 2
        for thing, path in places.items():
            if (place := path[frame]) is None:
                continue
            (x, y), (colour, shape) = place, thing.split()
            box = (x - r, y - r, x + r, y + r)
            if shape == "circle":
                pen.ellipse(box, fill=COLOURS[colour])
            elif shape == "square":
                pen.rectangle(box, fill=COLOURS[colour])
            else:
                pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=COLOURS[colour])
        images.append(image)
    return images


def load(**_: Any) -> dict[str, Any]:
    """The clips for lm-eval as `{"test": Dataset}`."""
    import datasets

    rows = []
    for family, count in FAMILIES.items():
        for number in range(count):
            question, answer = question_answer(family, number)
            rows.append({"id": f"{family}-{number:02d}", "family": family, "number": number})
            rows[-1] |= {"question": question, "answer": answer}
    return {"test": datasets.Dataset.from_list(rows)}


def video(row: Mapping[str, Any]) -> list[Video]:
    """The clip of a row, which is drawn when an engine needs it."""
    return [Video(LazyFrames(functools.partial(frames, row["family"], row["number"])), f"sample '{row['id']}'")]


def scores(row: Mapping[str, Any], answers: list[str]) -> dict[str, float]:
    """1 if the right choice is the only one in the answer; `parsed` is 0 where it has none or several."""
    text = " ".join(WORDS.get(word, word) for word in re.findall(r"\w+", answers[0].lower()))
    named = [choice for choice in draw(row["family"], row["number"])[2] if re.search(rf"\b{choice}\b", text)]
    return {"accuracy": float(named == [row["answer"]]), "parsed": float(len(named) == 1)}

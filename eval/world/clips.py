"""Clips to learn from: those of the suite `clips` with other numbers, and further questions about each.

    Which thing moves?                        red circle
    When does the red circle appear?          0 2 6       the pairs of frames, of eight, at which it comes
    Which thing appears last?                 blue square

The suite draws its clips from numbers below a hundred (`vlmcompress.evaluation.accuracy.clips`); no split here does.
"""

from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from random import Random

import numpy as np

from vlmcompress.evaluation.accuracy import clips
from vlmcompress.models.data.video import LazyFrames, Video

from .rows import png

FIRST = {"train": 1_000_000, "calibration": 800_000, "validation": 900_000}
"""Split -> its first number."""


def further_questions(family: str, number: int, random: Random) -> list[tuple[str, str]]:
    """Two questions about a clip beside the suite's, with answers."""
    *_, places = clips.draw(family, number)
    comes = {
        thing: [at // 2 for at, place in enumerate(path) if place and not (at and path[at - 1])]
        for thing, path in places.items()
    }
    when = [(f"When does the {thing} appear?", " ".join(map(str, pairs))) for thing, pairs in comes.items()]
    if family == "moved":
        return [("Which thing moves?", next(iter(places))), random.choice(when)]
    if family == "times":
        return when[:1] + [random.choice(when[1:])]
    return [("Which thing appears last?", max(comes, key=lambda thing: comes[thing])), random.choice(when)]


def asked_clips(split: str, variant: str) -> Iterator[tuple[Video, list[tuple[str, str]]]]:
    """Clips with their questions, the suite's first; without end, by the arguments alone."""
    for number in count(FIRST[split]):
        random = Random(number)
        family = random.choice(list(clips.FAMILIES))
        name = f"{split}-{family}-{number}"
        film = Video(LazyFrames(partial(clips.frames, family, number)), name)
        yield film, [clips.question_answer(family, number), *further_questions(family, number, random)]


def clip_rows(split: str, variant: str, number: int) -> list[dict]:
    """The first `number` rows, each a clip with the suite's question about it."""
    clips_and_turns = islice(asked_clips(split, variant), number)
    return [
        {"id": film.origin, "image": [], "video": film, "question": question, "answer": answer, "family": "clip"}
        for film, [(question, answer), *_] in clips_and_turns
    ]


def frame_rows(split: str, variant: str, number: int) -> list[dict]:
    """The rows of `clip_rows` with the frames of each clip as PNG."""
    rows = clip_rows(split, variant, number)
    return [row | {"video": [png(np.asarray(frame)) for frame in row["video"].source]} for row in rows]

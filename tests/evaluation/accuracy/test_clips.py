"""The suite `clips`, from end to end: engines get what is drawn; answers are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit.echo import Echo, checkpoint
from vlmcompress.engines import Request
from vlmcompress.evaluation.accuracy import clips
from vlmcompress.evaluation.accuracy.ask import ask_suite
from vlmcompress.evaluation.accuracy.tasks import load_suite


@pytest.mark.parametrize(
    ("family", "answers"),
    [
        ("moved", {"To the {}.": 1, "{}": 1, "left or right": 0, "It does not": None}),
        ("times", {"{} times": 1, "It appears {} times.": 1, "7": None, "": None}),
        ("first", {"The {}.": 1, "the {} does": 1, "none of them": None}),
    ],
)
def test_answers_about_clips(family: str, answers: dict[str, float | None]) -> None:
    for number in range(4):
        answer = clips.question_answer(family, number)[1]
        row = {"family": family, "number": number, "answer": answer}
        for text, score in answers.items():
            read = clips.scores(row, [text.format(answer)])
            assert read["accuracy"] == (score or 0) and (read["parsed"] or score != 1), text
    if family == "times":
        words = ["", "once", "twice", "three times", "FOUR"]
        assert clips.scores(row, [words[int(answer)]]) == {"accuracy": 1.0, "parsed": 1.0}


def test_clips_show_their_answers() -> None:
    """Measured in the frames: where a thing's pixels are, and in how many frames it comes anew."""
    for number in range(6):
        text, answer = clips.question_answer("moved", number)
        colour = clips.COLOURS[text.split()[4]]
        first, last = (
            np.argwhere((np.asarray(clips.frames("moved", number)[at]) == colour).all(2)).mean(0) for at in (0, -1)
        )
        down, across = last - first
        way = ("right" if across > 0 else "left") if abs(across) > abs(down) else "down" if down > 0 else "up"
        assert way == answer and max(abs(across), abs(down)) > 100
        text, answer = clips.question_answer("times", number)
        colour = clips.COLOURS[text.split()[5]]
        there = [(np.asarray(frame) == colour).all(2).any() for frame in clips.frames("times", number)]
        assert sum(now and not before for before, now in zip([False, *there], there, strict=False)) == int(answer)


def test_engines_answer_about_clips(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    suite = load_suite("clips", candidate=model, baseline=model, limit=3)
    engine = Echo(lambda request: clips.question_answer(*split(request))[1])
    samples = ask_suite(model, suite, engine).samples
    assert [(sample.family, sample.score) for sample in samples] == [(family, 1.0) for family in clips.FAMILIES]
    assert [[part["type"] for part in request.media()] for request in engine.asked] == [["video_url"]] * 3
    assert suite.pictures(samples[0].id) == []


def split(request: Request) -> tuple[str, int]:
    family, _, number = request.id.partition("-")
    return family, int(number)

"""The suites `clips` and `mvbench`, from end to end: engines get what is drawn, or cut from a film; answers are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.kit.echo import Echo, checkpoint, picture, question
from tests.kit.pictures import film
from vlmcompress.engines import Request
from vlmcompress.evaluation.accuracy import clips
from vlmcompress.evaluation.accuracy.ask import ask_suite
from vlmcompress.evaluation.accuracy.tasks import load_suite
from vlmcompress.utils.errors import UserError


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


def test_clips_are_asked(tmp_path: Path) -> None:
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


def test_mvbench(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of 40 frames at 8 a second the seconds 2 to 4 are asked about; of a folder of frames all; absent folders are left out."""
    model, data = checkpoint(tmp_path / "model"), tmp_path / "data"
    for folder in ("json", "video/star/Charades_v1_480", "video/tvqa/frames_fps3_hq/clip_7"):
        (data / folder).mkdir(parents=True)
    film(data / "video/star/Charades_v1_480/A.mp4", 40)
    for number in range(20):
        picture(data / "video/tvqa/frames_fps3_hq/clip_7", f"{number + 1:05d}.jpg", f"#{number * 10:02x}0000")
    row = {"question": "What happened?", "candidates": ["He ran.", "He sat.", "He left."], "answer": "He sat."}
    for task in (*clips.MVBENCH["star/Charades_v1_480"], "episodic_reasoning"):
        video = {"video": "clip_7"} if task == "episodic_reasoning" else {"video": "A.mp4", "start": 2.0, "end": 4.0}
        (data / "json" / f"{task}.json").write_text(json.dumps([row | video]))
    suite = load_suite("mvbench", data, candidate=model, baseline=model)
    engine = Echo(lambda request: "(B) He sat." if request.id.startswith("action") else "none")
    samples = ask_suite(model, suite, engine).samples
    assert {sample.id: (sample.score, sample.parsed) for sample in samples} == {
        "action_sequence-000": (1.0, True),
        "action_prediction-000": (1.0, True),
        "object_interaction-000": (0.0, False),
        "episodic_reasoning-000": (0.0, False),
    }
    assert question(engine.asked[0]).endswith(
        "\nOptions:\n(A) He ran.\n(B) He sat.\n(C) He left.\nOnly give the best option."
    )
    assert "lacks ssv2_video, " in capsys.readouterr().err
    rows = {row["id"]: row for row in clips.load_mvbench(name="mvbench", data=str(data))["test"]}
    cut, all_frames = (
        np.stack([np.asarray(frame) for frame in clips.mvbench_video(rows[name])[0].source])
        for name in ("action_sequence-000", "episodic_reasoning-000")
    )
    assert (cut[:, 0, -1, 0] - 20) / 5 == pytest.approx(np.arange(16, 32), abs=1)
    assert all_frames[:, 3, 4, 0] / 10 == pytest.approx((np.arange(16) + 0.5) * 19 / 16, abs=1.1)
    (data / "video/star/Charades_v1_480/A.mp4").write_bytes(b"broken")
    with pytest.raises(UserError, match="sample 'action_sequence-000': video .*A.mp4' cannot be decoded"):
        ask_suite(model, suite, engine)
    (data / "video/star/Charades_v1_480/A.mp4").unlink()
    with pytest.raises(UserError, match=r"3 videos are missing, e.g. .*A.mp4; unpack"):
        load_suite("mvbench", data, candidate=model, baseline=model)
    with pytest.raises(UserError, match="it has none of MVBench's videos"):
        load_suite("mvbench", data / "json", candidate=model, baseline=model)

"""Short clips for the suite `clips`, drawn here and not downloaded, and those of MVBench from a local copy.

    question, answer = question_answer("times", 7)     "How many times does the red circle appear? Answer with a number.", "3"
    frames("times", 7)                       16 images of 224 x 224 pixels

A clip asks what moved where, how many times, or what came first. No single frame tells: the answer is in their order, which a
reducer of videos may lose. Things stay for two frames at least, as Qwen's towers make tokens of pairs of frames.

MVBench (Li et al. 2023, arXiv 2311.17005) cuts most of its clips from longer videos. As in its `mvbench.ipynb` a model gets 16
frames, the middles of 16 equal parts of a clip; all engines get the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vlmcompress.evaluation.accuracy import local_data
from vlmcompress.evaluation.accuracy.scoring import NUMBERS, mmmu_choice
from vlmcompress.models.data.samples import open_image
from vlmcompress.models.data.video import LazyFrames, Video
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import foreign_errors, note

FAMILIES = {"moved": 80, "times": 80, "first": 80}
"""Family -> number of clips."""
FRAMES, SIDE, SIZE = 16, 224, 44
COLOURS = {"red": (214, 40, 40), "green": (44, 160, 60), "blue": (40, 84, 214), "orange": (242, 132, 24)}
SHAPES = ("circle", "square", "triangle")
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
WORDS = {**NUMBERS, "once": "1", "twice": "2"}
Place = tuple[float, float]

WATCH = (
    "Carefully watch the video and pay attention to the cause and sequence of events, the detail and movement of "
    "objects, and the action and pose of persons. Based on your observations, select the best option that accurately "
    "addresses the question."
)
MVBENCH = {
    "star/Charades_v1_480": ("action_sequence", "action_prediction", "object_interaction"),
    "ssv2_video": ("action_antonym",),
    "Moments_in_Time_Raw/videos": ("fine_grained_action",),
    "FunQA_test/test": ("unexpected_action",),
    "clevrer/video_validation": (
        *("object_existence", "moving_direction", "moving_count", "moving_attribute", "counterfactual_inference"),
    ),
    "perception/videos": ("object_shuffle", "action_count", "state_change", "character_order"),
    "sta/sta_video": ("action_localization",),
    "scene_qa/video": ("scene_transition",),
    "nturgbd": ("fine_grained_pose",),
    "vlnqa": ("egocentric_navigation",),
    "tvqa/frames_fps3_hq": ("episodic_reasoning",),
}
"""Folder of MVBench's videos -> its tasks, each a file in `json`."""
TVQA_RATE = 3.0  # frames a second, of the folders of frames


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


def load_mvbench(**options: Any) -> dict[str, Any]:
    """MVBench for lm-eval: the tasks in `json` of a local copy, with the videos unpacked anywhere next to it.

    Tasks whose folder of videos is absent are left out (NTU RGB+D's has to be asked for).

    Raises:
        UserError: there is no copy, it is in another form, or videos are missing.
    """
    import datasets

    root = local_data.copy_of(**options)
    folders = [folder for folder in root.rglob("*") if folder.is_dir()]
    rows, absent, missing = [], [], []
    for place, tasks in MVBENCH.items():
        source = next((folder for folder in folders if f"/{folder.as_posix()}".endswith(f"/{place}")), None)
        absent += [] if source else [place]
        for task in tasks if source else ():
            file = root / "json" / f"{task}.json"
            with foreign_errors(f"{file} can't be read", "; download MVBench again"):
                for number, row in enumerate(json_files.read(file)):
                    path = source / row["video"]
                    missing += [] if path.exists() else [path]
                    letter = "ABCDE"[row["candidates"].index(row["answer"])]
                    rows.append({"id": f"{task}-{number:03d}", "family": task, "video": str(path), "answer": letter})
                    rows[-1] |= {name: row.get(name) for name in ("question", "candidates", "start", "end")}
    if not rows or missing:
        what = f"{len(missing)} videos are missing, e.g. {missing[0]}" if missing else "it has none of MVBench's videos"
        raise UserError(f"{root}: {what}; unpack the zip files of the data set's folder video")
    if absent:
        note(f"{root} lacks {', '.join(absent)}; MVBench's questions about these videos are left out")
    return {"test": datasets.Dataset.from_list(rows)}


def mvbench_video(row: Mapping[str, Any]) -> list[Video]:
    origin = f"sample '{row['id']}'"
    return [Video(LazyFrames(functools.partial(_parts, Path(row["video"]), row["start"], row["end"], origin)), origin)]


def _parts(path: Path, start: float | None, end: float | None, origin: str) -> list[Image.Image]:
    """The middles of 16 equal parts of the clip from second `start` to `end` of a video, or of a folder of its frames."""

    def middles(rate: float, total: int) -> np.ndarray:
        first = 0 if start is None else max(0, round(start * rate))
        last = total - 1 if end is None else min(total - 1, round(end * rate))
        part = max(last - first, 0) / FRAMES
        return np.array([first + part / 2 + round(part * index) for index in range(FRAMES)], dtype=int).clip(
            0, total - 1
        )

    if not path.is_dir():
        return Video(path, origin).sampled(lambda about: middles(about.fps, about.total_num_frames))
    files = sorted(path.glob("*.jpg"))
    if not files:
        raise UserError(f"{origin}: {path} has no frames; unpack tvqa.zip again")
    return [open_image(files[index], origin) for index in middles(TVQA_RATE, len(files))]


def mvbench_text(row: Mapping[str, Any]) -> str:
    """The benchmark's own prompt: its system prompt, then question, options and the request for one of them."""
    options = "".join(f"({letter}) {text}\n" for letter, text in _options(row).items())
    return f"{WATCH}\nQuestion: {row['question']}\nOptions:\n{options}Only give the best option."


def mvbench(row: Mapping[str, Any], answers: list[str]) -> dict[str, float]:
    chosen = mmmu_choice(answers[0], _options(row))
    return {"accuracy": float(chosen == row["answer"]), "parsed": float(chosen is not None)}


def _options(row: Mapping[str, Any]) -> dict[str, str]:
    return dict(zip("ABCDE", row["candidates"], strict=False))

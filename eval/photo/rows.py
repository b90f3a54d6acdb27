"""Frozen questions about scenes, made where the pictures are: calibration, validation and test."""

import io
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from eval import english

from .pictures import Album
from .questions import ask_several
from .scene import GROUNDS, sample_scene
from .vocab import FAMILIES

PER_FAMILY = {"calibration": 25, "validation": 120, "test": 300}
OF_PHOTOGRAPHS = {"test": 150}
PER_IMAGE = 2  # questions of a family about an image
PROSE = 100  # calibration samples without an image
SCHEMA = pa.schema([
    ("id", pa.string()), ("image", pa.list_(pa.binary())),
    ("question", pa.string()), ("answer", pa.string()), ("family", pa.string()),
    ("background", pa.float32()), ("ground", pa.string()),
])  # fmt: skip


def split_rows(split: str, album: Album, per_family: int, grounds: Sequence[str] = GROUNDS) -> list[dict]:
    """The rows of a split, of scenes on `grounds`, families interleaved so that any prefix is balanced.

    `background`: share of the image's patches on which nothing stands; `ground`: what kind of background it is. Scenes are
    shared by families, so that an image is encoded once for several questions.
    """
    by_family: dict[str, list[dict]] = {family: [] for family in FAMILIES}
    number = 0
    while any(len(rows) < per_family for rows in by_family.values()):
        rng = Random(f"photo/{split}/rows/{number}")
        number += 1
        scene = sample_scene(rng, split, album, grounds)
        turns = {
            family: ask_several(rng, scene, family, album.names, 1 if len(scene.items) == 1 else PER_IMAGE)
            for family, rows in by_family.items() if len(rows) < per_family
        }  # fmt: skip
        if not any(turns.values()):
            continue
        drawn = scene.draw(album)
        image = io.BytesIO()
        Image.fromarray(drawn.pixels).save(image, "PNG")
        shared = {
            "image": [image.getvalue()], "background": drawn.background(),
            "ground": scene.ground,
        }  # fmt: skip
        for family, pairs in turns.items():
            rows = by_family[family]
            for question, answer in pairs[: per_family - len(rows)]:
                name = f"{split}-photo-{family}-{len(rows):04d}"
                rows.append({"id": name, "question": question, "answer": answer, "family": family} | shared)
    return [row for together in zip(*by_family.values(), strict=True) for row in together]


def write_data(
    folder: Path, album: Album, per_family: dict[str, int] = PER_FAMILY, grounds: Sequence[str] = GROUNDS
) -> None:
    """Write the splits that `per_family` has to ``folder`` as parquet; the calibration split has English prose, too."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in per_family.items():
        rows = split_rows(split, album, number, grounds)
        if split == "calibration":
            rows += [_prose(k, text) for k, text in enumerate(english.paragraphs(split)[:PROSE])]
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{split}.parquet")


def _prose(number: int, text: str) -> dict:
    """A sample without an image: the first sentence as a user's message, the rest as the answer."""
    question, answer = english.halves(text)
    name = f"calibration-english-{number:04d}"
    return {"id": name, "image": [], "question": question, "answer": answer, "family": "english"}

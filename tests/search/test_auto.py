"""`vlmcompress auto`: questions made of images alone, and a search on them."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.kit import pictures
from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli
from vlmcompress.errors import UserError
from vlmcompress.search import own_answers


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Sixty-four pictures, and a copy of one."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(64):
        pictures.picture(224, 224, seed=number).save(folder / f"{number:02}.png")
    shutil.copy(folder / "00.png", folder / "copy.png")
    return folder


def test_parts_share_no_image(images):
    parts = own_answers.split(images, 1000, 0.5)
    names = [path.read_bytes() for part in (parts.calibration, parts.search, parts.confirm) for path in part]
    assert len(names) == len(set(names)) == 64, "the copy counts once"
    assert (len(parts.calibration), len(parts.search), len(parts.confirm)) == (16, 16, 32)
    assert own_answers.split(images, 1000, 0.5) == parts, "the same each time"
    parts = own_answers.split(images, 1000, 0.1)
    assert (len(parts.calibration), len(parts.search), len(parts.confirm)) == (13, 15, 36), "fewer confirm nothing"


def test_too_few_images(images, tmp_path):
    shutil.copy(images / "00.png", tmp_path / "one.png")
    with pytest.raises(UserError, match="1 different images; give at least 64"):
        own_answers.split(tmp_path, 1000, 0.1)
    with pytest.raises(
        UserError, match="64 different images; give at least 100, better hundreds: an agreement of 0.95"
    ):
        own_answers.split(images, 1000, 0.05)
    with pytest.raises(UserError, match="is no folder"):
        own_answers.split(tmp_path / "absent", 1000, 0.1)


@pytest.mark.slow
def test_from_images_to_a_checkpoint(images, tmp_path, capsys):
    """Answers are held to the original's own, which all its questions have."""
    out = tmp_path / "out"
    given = ["auto", DEMO_LLAVA, "-o", out, "--images", images, "--engine", "hf", "--optimize", "memory", "--json"]
    code = cli.main([*map(str, given), "--min-agreement", "0.5", "--target", "cpu"])
    found = json.loads(capsys.readouterr().out)
    assert code in (0, 4) and found["reference"] == "the original's own answers"
    assert found["original"]["accuracy"] == 1.0, "the original agrees with itself"
    rows = [json.loads(line) for line in (out / "questions" / "questions.jsonl").read_text().splitlines()]
    assert rows and all(row["answer"] and row["question"] in own_answers.PROMPTS for row in rows)


@pytest.mark.parametrize(
    ("given", "line"),
    [(["--min-agreement", "1"], "is no share between 0 and 1"), (["--prompts", "none.txt"], "cannot be read")],
)
def test_what_is_refused(images, tmp_path, capsys, given, line):
    code = cli.main(["auto", str(DEMO_LLAVA), "-o", str(tmp_path / "out"), "--images", str(images), *given])
    assert code == 2 and line in capsys.readouterr().err

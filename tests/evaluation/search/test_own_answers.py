"""A search without questions: they are made of images, and the original's answers are the reference."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys

import pytest

from tests.kit import pictures
from tests.kit.edits import edited, other_weights
from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli
from vlmcompress.evaluation.search import own_answers
from vlmcompress.evaluation.search.trial import Setup
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import silent


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Sixty-four pictures, and a copy of one."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(64):
        pictures.picture(224, 224, seed=number).save(folder / f"{number:02}.png")
    shutil.copy(folder / "00.png", folder / "copy.png")
    return folder


def test_parts_share_no_image(images):
    parts = own_answers.split_images(images, 1000, 0.5)
    names = [path.read_bytes() for part in (parts.calibration, parts.search, parts.confirm) for path in part]
    assert len(names) == len(set(names)) == 64, "the copy counts once"
    assert (len(parts.calibration), len(parts.search), len(parts.confirm)) == (16, 16, 32)
    assert own_answers.split_images(images, 1000, 0.5) == parts, "the same each time"
    parts = own_answers.split_images(images, 1000, 0.1)
    assert (len(parts.calibration), len(parts.search), len(parts.confirm)) == (13, 15, 36), "fewer confirm nothing"


def test_too_few_images(images, tmp_path):
    shutil.copy(images / "00.png", tmp_path / "one.png")
    with pytest.raises(UserError, match="1 different images; give at least 64"):
        own_answers.split_images(tmp_path, 1000, 0.1)
    with pytest.raises(
        UserError, match="64 different images; give at least 100, better hundreds: an agreement of 0.95"
    ):
        own_answers.split_images(images, 1000, 0.05)
    with pytest.raises(UserError, match="is not a folder"):
        own_answers.split_images(tmp_path / "absent", 1000, 0.1)


@pytest.mark.parametrize("changed", ["model", "images", "prompts"])
def test_answers_of_other_questions_are_not_reused(images, tmp_path, changed):
    """Edited files under the same paths: the questions there, and the original's answers to them, are of others."""
    model, questions = tmp_path / "model", tmp_path / "out" / "questions"
    shutil.copytree(DEMO_LLAVA, model)
    parts, setup = (
        own_answers.split_images(images, 1000, 0.5),
        Setup({"model": str(model)}, None, None, 0, "hf", tmp_path),
    )
    questions.mkdir(parents=True)
    for name in (own_answers.CALIBRATION, own_answers.SEARCH, own_answers.CONFIRM):
        (questions / name).write_text("{}\n")
    own_answers.write_questions(parts, own_answers.PROMPTS, questions, setup, silent)
    own_answers.write_questions(parts, own_answers.PROMPTS, questions, setup, silent)  # the same again
    first, prompts = parts.search[0], own_answers.PROMPTS[1:] if changed == "prompts" else own_answers.PROMPTS
    edits = {"model": other_weights(model), "images": edited(first, first.read_bytes() + b"more")}
    with (
        edits.get(changed, contextlib.nullcontext()),
        pytest.raises(UserError, match=f"has questions of another {changed};"),
    ):
        own_answers.write_questions(parts, prompts, questions, setup, silent)


@pytest.mark.slow
def test_from_images_to_a_checkpoint(images, tmp_path, capsys):
    """Answers are held to the original's own, which all its questions have."""
    out = tmp_path / "out"
    arguments = [
        "search",
        DEMO_LLAVA,
        "-o",
        out,
        "--images",
        images,
        "--engine",
        "hf",
        "--optimize",
        "memory",
        "--json",
    ]
    code = cli.main([*map(str, arguments), "--max-drop", "0.5", "--target", "cpu"])
    printed = json.loads(capsys.readouterr().out)
    assert code in (0, 4) and printed["reference"] == "the original's own answers"
    assert printed["original"]["accuracy"] == 1.0, "the original agrees with itself"
    rows = [json.loads(line) for line in (out / "questions" / "questions.jsonl").read_text().splitlines()]
    assert rows and all(row["answer"] and row["question"] in own_answers.PROMPTS for row in rows)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--max-drop", "1"], "is not a share between 0 and 1"),
        (["--prompts", "none.txt"], "cannot be read"),
    ],
)
def test_flags_are_refused_before_libraries_are_imported(images, tmp_path, flags, line):
    """Known without a look at the model: in a process of its own, torch is not imported."""
    call = ["search", str(DEMO_LLAVA), "-o", str(tmp_path / "out"), "--images", str(images), *flags]
    code = f"import sys; from vlmcompress import cli; print(cli.main({call!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2 False\n" and line in done.stderr and not (tmp_path / "out").exists(), done.stderr

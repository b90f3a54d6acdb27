"""Which questions are asked, how answers are scored; and one evaluation in the real engine."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.tiny import build
from vlmcompress.calibration.rows import Sample
from vlmcompress.errors import UserError
from vlmcompress.evaluation.accuracy import evaluate, normalise
from vlmcompress.evaluation.questions import fingerprint, load, stratified, write_requests


@pytest.mark.parametrize("text", ["Red Star", " red   star.", "RED\nSTAR", "red star .", "red star"])
def test_normalise(text: str) -> None:
    assert normalise(text) == "red star"


def test_normalise_keeps_what_matters() -> None:
    assert normalise("3.5") == "3.5" and normalise("no") != normalise("not") and normalise(" . ") == ""


def samples(**families: int) -> list[Sample]:
    return [Sample(f"{name}{i}", (), "q", "a", name) for name, n in families.items() for i in range(n)]


def test_stratified_is_proportional_and_deterministic() -> None:
    pool = samples(a=60, b=30, c=10)
    chosen = stratified(pool, 20, seed=0)
    assert Counter(s.family for s in chosen) == {"a": 12, "b": 6, "c": 2}
    assert chosen == stratified(list(pool), 20, seed=0)
    assert {s.id for s in chosen} == {s.id for s in stratified(pool[::-1], 20, seed=0)}
    assert {s.id for s in chosen} != {s.id for s in stratified(pool, 20, seed=1)}
    assert {s.id for s in stratified(pool, 10, seed=0)} < {s.id for s in chosen}


@pytest.mark.parametrize("limit", [1, 2, 7, 99])
def test_stratified_gives_what_was_asked_for(limit: int) -> None:
    assert len(stratified(samples(a=33, b=33, c=34), limit, seed=0)) == limit


def test_stratified_without_need() -> None:
    pool = samples(a=3)
    assert stratified(pool, None, 0) == stratified(pool, 5, 0) == pool
    with pytest.raises(UserError, match="--limit 0: must be at least 1"):
        stratified(pool, 0, 0)


def test_requests_keep_image_order_and_write_equal_images_once(tmp_path: Path) -> None:
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}, {"type": "image"}]},
    ]
    asked = [Sample("1", (red, blue), "which?", "a"), Sample("2", (blue, red), "x", "a", messages=turns)]
    asked += [Sample("3", (red, blue), "again", "a"), Sample("4", (), "no image", "a")]
    requests, images = write_requests(asked, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert images[0] == images[2] != images[1] and images[3] == "text:4"

    def seen(content: list[dict]) -> list:
        files = [Path(p["image_url"]["url"].removeprefix("file://")) for p in content if p["type"] == "image_url"]
        return [Image.open(file).getpixel((0, 0)) for file in files]

    assert seen(requests[0].messages[0]["content"]) == [(255, 0, 0), (0, 0, 255)]
    assert [part["type"] for part in requests[0].messages[0]["content"]] == ["image_url", "image_url", "text"]
    assert seen(requests[1].messages[1]["content"]) == [(0, 0, 255), (255, 0, 0)]
    assert [part["type"] for part in requests[1].messages[1]["content"]] == ["text", "image_url", "image_url"]
    assert requests[1].messages[0] == turns[0]
    assert [r.images() for r in requests] == [2, 2, 2, 0]


def test_fingerprint_sees_every_change(tmp_path: Path) -> None:
    base = Sample("1", (), "q", "a", "f")
    others = [Sample("2", (), "q", "a", "f"), Sample("1", (), "p", "a", "f"), Sample("1", (), "q", "b", "f")]
    prints = {fingerprint([s], ["i"]) for s in [base, *others]} | {fingerprint([base], ["j"])}
    assert len(prints) == 5


# ---- bad input: nothing of this starts an engine


def write_rows(file: Path, *rows: dict) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    Image.new("RGB", (30, 30), "red").save(tmp_path / "a.png")
    return tmp_path


def test_missing_checkpoints(folder: Path) -> None:
    with pytest.raises(UserError, match="nothing: no such checkpoint folder"):
        evaluate(folder / "model", folder / "nothing")
    (folder / "model" / "config.json").unlink()
    with pytest.raises(UserError, match="not a checkpoint, it has no config.json"):
        evaluate(folder / "model", folder / "model")


def test_no_bundled_data(folder: Path) -> None:
    with pytest.raises(UserError, match="no data set is bundled with .*--data FILE"):
        evaluate(folder / "model", folder / "model")


@pytest.mark.parametrize("answer", [{}, {"answer": ""}, {"answer": None}])
def test_data_without_answers(folder: Path, answer: dict) -> None:
    rows = [{"image": "a.png", "question": "q", "answer": "a"}, {"image": "a.png", "question": "q", **answer}]
    with pytest.raises(UserError, match="data.jsonl.* has no answer"):
        evaluate(folder / "model", folder / "model", write_rows(folder / "data.jsonl", *rows))


def test_empty_and_missing_data(folder: Path) -> None:
    (folder / "data.jsonl").write_text("")
    with pytest.raises(UserError, match="data.jsonl is empty"):
        load(folder / "data.jsonl", folder, folder, 0)
    with pytest.raises(UserError, match="does not exist"):
        load(folder / "nothing.jsonl", folder, folder, 0)


def test_missing_image_is_named(folder: Path) -> None:
    data = write_rows(folder / "data.jsonl", {"image": "gone.png", "question": "q", "answer": "a"})
    with pytest.raises(UserError, match="gone.png"):
        evaluate(folder / "model", folder / "model", data)


# ---- the real engine


@pytest.mark.engine
def test_evaluation_in_the_real_engine(tmp_path: Path) -> None:
    """Baseline: a tiny random model. Candidate: the same with its LM head's rows shifted, so that it says other things.

    The expected answers are what the baseline says (found in a first evaluation of it against itself), so it must be right
    everywhere and the candidate nowhere.
    """
    baseline = build("qwen2_5_vl", tmp_path / "base")
    candidate = Path(shutil.copytree(baseline, tmp_path / "changed"))
    tensors = load_file(candidate / "model.safetensors")
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], 7, 0).contiguous()
    save_file(tensors, candidate / "model.safetensors", metadata={"format": "pt"})
    for name, size in (("a", (56, 84)), ("b", (112, 56))):
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    rows = [{"id": f"q{i}", "image": [["a.png"], ["a.png", "b.png"], []][i % 3], "question": f"what {i}", "answer": "?",
             "family": ("one", "two", "none")[i % 3]} for i in range(6)]  # fmt: skip

    first = evaluate(baseline, baseline, write_rows(tmp_path / "data.jsonl", *rows))
    assert first.agreement == 1.0 and first.overall.neither == 6 and not first.pictures
    assert first.overall.low < 0 < first.overall.high

    said = {s.id: s.baseline for s in first.samples}
    rows = [row | {"answer": said[row["id"]].upper() + "."} for row in rows if normalise(said[row["id"]])]
    second = evaluate(candidate, baseline, write_rows(tmp_path / "data.jsonl", *rows))
    assert second.overall.baseline_accuracy == 1.0 and second.overall.candidate_accuracy == 0.0
    assert second.overall.high < 0 and set(second.families) <= {"one", "two", "none"}
    assert second.baseline.weight_bytes == second.candidate.weight_bytes > 0
    assert {len(pictures) for pictures in second.pictures.values()} <= {0, 1, 2} and second.pictures
    json.dumps(second.to_dict())

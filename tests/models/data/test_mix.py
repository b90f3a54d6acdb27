"""Text samples mixed into the data: as many, always the same ones, known to manifests and statistics by their hash."""

from __future__ import annotations

import json

import pytest
import torch

from tests.kit import calibration_rows, tiny
from vlmcompress import models
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import data_hash, load_mixed, load_samples
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.inputs import read_inputs
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny model, six samples with images and nine of text in two dialects."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 6)
    rows = [{"text": f"passage number {i}"} for i in range(5)]
    rows += [{"question": f"how much is {i} and {i}", "answer": str(2 * i)} for i in range(4)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.build("llava", folder / "llava")
    return folder


def recipe(world, out, scheme="none", **calib):
    calibrate = {"data": str(world / "calib.jsonl"), "text": str(world / "text.jsonl"), "samples": 8} | calib
    calib = {key: value for key, value in calibrate.items() if value is not None}
    return resolve({"model": str(world / "llava"), "out": str(out), "scheme": scheme, "calibrate": calib}).recipe


def test_as_many_of_each(world):
    data, text = str(world / "calib.jsonl"), str(world / "text.jsonl")
    pictured, texts = load_mixed(data, text, samples=8, seed=0)
    assert len(pictured) == len(texts) == 4
    assert all(sample.images for sample in pictured) and not any(sample.images for sample in texts)
    assert data_hash(pictured) == data_hash(load_samples(data, samples=4, seed=0))
    again = load_mixed(data, text, samples=8, seed=0)
    other = load_mixed(data, text, samples=8, seed=1)
    assert data_hash(again[1]) == data_hash(texts) != data_hash(other[1])
    pictured, texts = load_mixed(data, text, samples=100, seed=0)
    assert len(pictured) == len(texts) == 6, "the data have six"
    assert {sample.answer for sample in texts} & {"0", "2", "4", "6", None} == {sample.answer for sample in texts}
    assert any(sample.question.startswith("passage") for sample in texts)
    assert load_mixed(data, None, samples=3, seed=0)[1] == []


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"image": "0.png", "question": "x"}], "shows an image; give a file of text alone"),
        ([{"words": "x"}], "needs a column messages, conversations, question or text; found: words"),
        ([{"text": ""}], "question is missing or empty"),
    ],
)
def test_a_text_source_without_text_is_refused(world, rows, problem):
    path = world / "bad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=problem):
        load_mixed(world / "calib.jsonl", path, samples=4, seed=0)
    with pytest.raises(UserError, match="with calibrate.text take at least 2"):
        load_mixed(world / "calib.jsonl", world / "text.jsonl", samples=1, seed=0)


def test_statistics_are_of_images_and_text(world, tmp_path):
    """Gram matrices are sums over samples: those of the mixture are those of the two halves together."""
    vlm = models.load(world / "llava")
    done = read_inputs(recipe(world, tmp_path / "x"), vlm, "x")
    encoded, origin = done.samples, done.origin
    assert origin["samples"] == 8 and origin["images"] == 4
    assert origin["text"]["source"] == "text.jsonl" and origin["text"]["samples"] == 4
    assert ["pixel_values" in sample for sample in encoded] == [True] * 4 + [False] * 4
    blocks = decoder_blocks(vlm.model, vlm.spec)
    _, captured = next(capture_blocks(vlm, blocks, encoded, CaptureSpec(frozenset({"gram"}))))
    pooled = {"text": 1.0, "vision": 1.0, "answer": 1.0}
    inputs: list[torch.Tensor] = []
    vlm.model.set_attn_implementation("eager")
    group = captured.stats["qkv"]
    linear = vlm.model.get_submodule(blocks[0][0].linears[0])
    linear.register_forward_pre_hook(lambda _module, args: inputs.append(args[0][0].float()))
    for sample in encoded:
        with torch.no_grad():
            vlm.model(**{key: value for key, value in sample.items() if key != "modality"})
    x = torch.cat(inputs)
    torch.testing.assert_close(group.gram(pooled), x.T @ x, rtol=1e-2, atol=1e-2 * float((x.T @ x).diagonal().mean()))
    assert sum(group.count.values()) == len(x) == sum(origin["tokens"].values())

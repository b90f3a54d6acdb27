"""Planted outliers: the same logits bit for bit, larger inputs, more error under rounding, and labels that say so."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit import tiny
from tests.kit.places import DEMO_LLAVA, DEMOS, ROOT
from vlmcompress import models
from vlmcompress.models.data import encode, load_samples
from vlmcompress.numerics import round_to_nearest, weight_only

DATA = DEMOS / "data" / "llava"


@pytest.fixture
def run(monkeypatch, capsys):
    """A script, run in this process with arguments; returns the JSON object that its last line is."""

    def call(name: str, *arguments: object) -> dict:
        path = ROOT / "scripts" / "measure" / f"{name}.py"
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Tiny models, questions about pictures, and questions without one."""
    folder = tmp_path_factory.mktemp("planted")
    random = np.random.default_rng(0)
    rows = []
    for i in range(4):
        Image.fromarray(random.integers(0, 256, (56, 56, 3), np.uint8)).save(folder / f"{i}.png")
        rows.append({"id": str(i), "image": f"{i}.png", "question": f"what is in picture {i}", "answer": "red"})
    for name, kept_rows in (("seen.jsonl", rows), ("blind.jsonl", [row | {"image": None} for row in rows])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in kept_rows))
    for family in ("llava", "qwen2-5-vl", "gemma3"):
        tiny.build(family, folder / family)
    return folder


def all_logits(folder: Path, data: Path, samples: int) -> tuple[list[torch.Tensor], models.VLM]:
    vlm = models.load(folder)
    assert next(vlm.model.parameters()).dtype == torch.bfloat16
    batches = encode(load_samples(data, samples=samples, seed=5), vlm)
    with torch.no_grad():
        return [vlm.model(**{k: v for k, v in b.items() if k != "modality"}).logits for b in batches], vlm


@pytest.mark.parametrize("where", ["all", "vision"])
@pytest.mark.parametrize("family", ["llava", "qwen2-5-vl", pytest.param("demo-llava", marks=pytest.mark.slow)])
def test_logits_are_the_same_bits(world, tmp_path, run, family, where):
    """Oracle: the original. Norms and columns changed, by exactly the factor, and nothing else did."""
    demo = family == "demo-llava"
    source, data = (DEMO_LLAVA, DATA / "validation.parquet") if demo else (world / family, world / "seen.jsonl")
    calibration = [] if demo else ["--calib", data]
    facts = run("plant_outliers", source, "-o", tmp_path / "out", "--where", where, "--channels", 5, *calibration)
    assert (facts["where"], facts["factor"], facts["source"]) == (where, 16, family)
    before, original = all_logits(source, data, 8)
    after, planted = all_logits(tmp_path / "out", data, 8)
    assert len(before) >= 4 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    changed, old = 0, dict(original.model.named_parameters())
    for name, new in planted.model.named_parameters():
        ratio = new.float() / old[name].float()
        factors = {1.0, 16.0} if "norm" in name else {1.0, 1 / 16}
        assert set(ratio[ratio.isfinite()].unique().tolist()) <= factors, name
        changed += not torch.equal(new, old[name])
    layers = len(models.decoder_layers(planted.model, planted.spec))
    linears = {
        name for g in models.resolve(planted.model, planted.spec) if g.smooth_kind == "norm" for name in g.linears
    }
    assert changed == 2 * layers + len(linears)
    if where == "vision" and demo:
        assert 0.6 < facts["visual_share"] < 0.75


def test_rounding_loses_more(tmp_path, run):
    """What it is for: the output error of round-to-nearest on true inputs of a layer grows at least twofold."""
    run("plant_outliers", DEMO_LLAVA, "-o", tmp_path / "out")
    errors = []
    for folder in (DEMO_LLAVA, tmp_path / "out"):
        vlm = models.load(folder)
        linear, inputs = vlm.model.get_submodule("model.language_model.layers.1.mlp.up_proj"), []
        linear.register_forward_pre_hook(lambda _module, args, inputs=inputs: inputs.append(args[0][0].float()))
        for batch in encode(load_samples(DATA / "calibration.parquet", samples=8, seed=0), vlm):
            vlm.model(**{k: v for k, v in batch.items() if k != "modality"})
        x, w = torch.cat(inputs), linear.weight.float()
        new = round_to_nearest(w, weight_only(4, 128).weights).dequantize(torch.float32)
        errors.append(float((x @ (new - w).T).square().sum() / (x @ w.T).square().sum()))
    assert errors[1] > 2 * errors[0]


def test_labels(world, tmp_path, run):
    """Config and card say that it is planted, and how; the source's card and its front matter are still there."""
    out = tmp_path / "out"
    run("plant_outliers", DEMO_LLAVA, "-o", out, "--factor", 8, "--channels", 3)
    config = json.loads((out / "config.json").read_text())
    assert config["_name_or_path"] == "demo-llava-planted-all"
    assert config["planted_outliers"]["factor"] == 8 and config["planted_outliers"]["channels"] == 3
    text = (out / "README.md").read_text()
    assert text.startswith("---\nlicense: apache-2.0") and "# out (planted outliers)" in text
    assert "**Planted outliers.**" in text and "3 channels" in text and "# demo-llava" in text
    assert {path.name for path in DEMO_LLAVA.iterdir()} == {path.name for path in out.iterdir()}
    bare = tmp_path / "bare"
    run("plant_outliers", world / "llava", "-o", bare, "--calib", world / "blind.jsonl")
    assert (bare / "README.md").read_text().startswith("# bare (planted outliers)")


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        ("llava", ["--factor", 12], "--factor must be a power of two of at least 2, got 12"),
        ("llava", ["--factor", 1], "--factor must be a power of two of at least 2, got 1"),
        ("llava", ["--channels", 0], "--channels must be from 1 to 128, got 0"),
        ("llava", ["--channels", 4000], "--channels must be from 1 to 128, got 4000"),
        ("llava", ["--where", "vision", "--calib", "blind.jsonl"], "have no images, so no channel is visual"),
        ("gemma3", [], "add a constant to their weight"),
        ("nowhere", [], "does not exist"),
    ],
)
def test_bad_input(world, tmp_path, run, capsys, family, flags, message):
    flags = [world / flag if str(flag).endswith(".jsonl") else flag for flag in flags]
    flags += [] if "--calib" in flags else ["--calib", world / "seen.jsonl"]
    with pytest.raises(SystemExit) as ended:
        run("plant_outliers", world / family, "-o", tmp_path / "out", *flags)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()

"""`vlmcompress recover --train scales` on tiny models: codes stay, scales move, answers are closer to the original's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import calibration_rows, spread, tiny
from tests.kit.command_line import run
from tests.kit.edits import other_weights
from tests.kit.next_steps import follow
from tests.kit.recovering import divergence
from vlmcompress import cli
from vlmcompress.recipe import Recipe
from vlmcompress.training.recover_scales import recover_scales
from vlmcompress.training.train_student import TrainingOptions
from vlmcompress.utils.errors import UserError

FEW = ("--samples", 24, "--steps", 12, "--every", 4, "--batch", 2, "--lr", 2e-3)
SCHEMES = {
    "int4": ("--scheme", "rtn", "--set", "options.group_size=32", "--set", "options.symmetric=false"),
    "int8": ("--scheme", "int8"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A model, data, and quantized checkpoints of it; the one of 4 bits carries a reducer."""
    folder = tmp_path_factory.mktemp("world")
    data = calibration_rows.write(folder, 24, lambda row: f"{row}.png" if row % 6 else [], kinds=3)
    spread.spread(tiny.build("llava", folder / "tiny"), folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "float32"
    (folder / "model" / "config.json").write_text(json.dumps(config))
    for name, scheme in SCHEMES.items():
        reduce = ("--reduce", "divprune:0.5") if name == "int4" else ()
        arguments = ("quantize", folder / "model", *scheme, *reduce, "--calib", data, "-o", folder / name)
        assert cli.main([*map(str, arguments)]) == 0
    return folder


def asked(world: Path, name: str, out: Path, train: str = "scales") -> tuple:
    arguments = ("--teacher", world / "model", "--train", train, "--calib", world / "calib.jsonl")
    return "recover", world / name, *arguments, "-o", out


def test_a_run_with_a_retrained_teacher_is_no_going_on(world, tmp_path):
    """Its weights have the same shapes and the same time of last change."""

    def broken(_label: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    calibrate = {"data": str(world / "calib.jsonl"), "samples": 24}
    recipe = Recipe.of(world / "int8", tmp_path / "out", scheme="none", calibrate=calibrate)
    train = TrainingOptions(train=("scales",))
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            recover_scales(recipe, train, world / "model", resume=resume, progress=broken)
    with other_weights(world / "model"), pytest.raises(UserError, match="had --teacher with the files "):
        recover_scales(recipe, train, world / "model", resume=True)


@pytest.mark.parametrize(("name", "train"), [("int4", "scales,norms"), ("int8", "scales")])
def test_what_is_written(world, tmp_path, capsys, name, train):
    """Other scales of the same types, all else as it was; transformers measures what the manifest says; the doctor agrees."""
    out = tmp_path / "out"
    code, text, err = run(capsys, *asked(world, name, out, train), *FEW, "--json")
    assert code == 0, err
    facts = json.loads(text)
    kl = facts["recovery"]["held_out_kl"]
    assert facts["recovery"]["changed"] and 0 < kl["after"] < 0.9 * kl["before"]
    assert set(facts["recovery"]["parameters"]) == set(train.split(","))
    assert follow(facts["next"], world / "calib.jsonl", tmp_path) == ["eval"]
    assert str(world / "model") in facts["next"][0]
    near = (
        0.02 if name == "int4" else 0.5
    )  # transformers rounds activations to steps of max / 127.5, engines of max / 127
    for folder, value in ((world / name, kl["before"]), (out, kl["after"])):
        assert divergence(world / "model", folder, world / "calib.jsonl") == pytest.approx(value, rel=near)
    before, after = (load_file(folder / "model.safetensors") for folder in (world / name, out))
    assert [(key, tensor.shape, tensor.dtype) for key, tensor in before.items()] == [
        (key, tensor.shape, tensor.dtype) for key, tensor in after.items()
    ]
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    scales = {key for key in before if key.endswith("weight_scale")}
    assert scales <= moved and all("norm" in key for key in moved - scales) and (moved > scales) == ("norms" in train)
    assert (out / "config.json").read_bytes() == (world / name / "config.json").read_bytes()
    manifest = json.loads((out / "vlmcompress.json").read_text())
    assert manifest["errors"] == {} and manifest["recovery"]["teacher"]["source"] == "model"
    assert manifest["recovery"]["data"]["samples"] == 24
    assert "Trained after it was quantized, its codes as they were" in (out / "README.md").read_text()
    code, text, _ = run(capsys, "doctor", out, "--source", world / "model")
    assert code == 0, text
    code, _, err = run(capsys, "report-error", out)
    assert code == 2 and "its scales were trained; measure them with --stats STATS --model MODEL" in err
    assert not (tmp_path / ".out.recover").exists()


def test_nothing_better_leaves_the_bytes(world, tmp_path, capsys):
    code, text, err = run(capsys, *asked(world, "int8", tmp_path / "out"), *FEW, "--steps", 2, "--lr", 0.9)
    assert code == 0, err
    assert "Nothing was better than those that were there, which were written." in text
    weights = [(folder / "model.safetensors").read_bytes() for folder in (world / "int8", tmp_path / "out")]
    assert weights[0] == weights[1]


def test_what_is_refused(world, tmp_path, capsys):
    out = tmp_path / "out"
    whole = asked(world, "int4", out)
    other = tiny.build("qwen2-5-vl", tmp_path / "other")
    assert run(capsys, "quantize", world / "model", "--scheme", "fp8", "-o", tmp_path / "fp8")[0] == 0
    for arguments, said in (
        (("recover", world / "int4", "--train", "scales", "-o", out), "--train scales needs --teacher ORIGINAL"),
        (asked(world, "int4", out, "norms"), "--teacher goes with --train scales"),
        (asked(world, "int4", out, "scales,lora"), "--train lora: beside scales only projector and norms"),
        ((*whole, "--reduce", "divprune:0.5"), "behind the reducer that MODEL carries; leave out --reduce"),
        (asked(world, "model", out), "is not quantized"),
        ((*whole[:3], other, *whole[4:]), "is not the original of"),
        ((*whole[:3], world / "int8", *whole[4:]), "quantized already"),
        ((whole[0], tmp_path / "fp8", *whole[2:]), "scales are trained of int weights in compressed-tensors"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and said in err and err.count("\n") == 1 and not out.exists(), (said, err)

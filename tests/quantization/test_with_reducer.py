"""Recipes with a reducer: which layer of settings wins, what is refused before anything is read, and what is written."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from tests.kit import calibration_rows, tiny
from vlmcompress import cli
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.export import manifest
from vlmcompress.quantization import inputs
from vlmcompress.quantization.plan import make_plan
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import choice
from vlmcompress.utils.errors import UserError

BASE = {"model": "m", "scheme": "none"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.build(name, folder / name) for name in ("llava", "qwen2-5-vl")}


def recipe(model, **keys):
    return resolve({"scheme": "none", "model": str(model)} | keys).recipe


def reduced(setup, file_text, folder):
    file = folder / "recipe.yaml"
    file.write_text(file_text)
    return resolve(BASE | setup, file)


@pytest.mark.parametrize("text", ["reduce: dart:0.25\n", "reduce: {method: dart, keep: 0.25}\n"])
def test_a_recipe_names_a_reducer_in_either_form(tmp_path, text):
    got = reduced({}, text, tmp_path)
    assert got.recipe.reduce == choice.parse_reducer("dart:0.25")
    assert got.recipe.plain()["reduce"] == {"method": "dart", "keep": 0.25, "pivots": 0}
    assert got.origin("reduce.keep") == f"recipe {tmp_path / 'recipe.yaml'}"


def test_no_reducer_by_default_and_null_removes_one(tmp_path):
    assert resolve(BASE).recipe.reduce is None and resolve(BASE).recipe.plain()["reduce"] is None
    assert reduced({"reduce": None}, "reduce: dart:0.25\n", tmp_path).recipe.reduce is None


def test_a_named_method_starts_anew_and_an_option_amends(tmp_path):
    text = "reduce: {method: dart, keep: 0.25, pivots: 8}\n"
    assert reduced({"reduce": "divprune"}, text, tmp_path).recipe.reduce == choice.parse_reducer("divprune")
    amended = reduced({"reduce": {"keep": 0.5}}, text, tmp_path)
    assert amended.recipe.reduce == choice.parse_reducer("dart:0.5,pivots=8")
    assert amended.origin("reduce.keep") == "command line"
    assert reduced({"reduce": {"keep": 0.5}}, "reduce: dart\n", tmp_path).recipe.reduce == choice.parse_reducer(
        "dart:0.5"
    )


@pytest.mark.parametrize(
    ("setup", "text"),
    [
        ("dort:0.5", "command line: reduce: unknown reducer 'dort'; did you mean 'dart'?"),
        ("dart:0", "keep must be a number above 0 and at most 1, got 0"),
        ("dart:1.1", "keep must be a number above 0 and at most 1, got 1.1"),
        ("dart:0.5,pivot=3", "no option 'pivot'; did you mean 'pivots'"),
        ("dart:0.5,0.3", "'0.3' is not a setting"),
        ({"keep": 0.5}, "write it like {method: dart, keep: 0.5}"),
        (["dart", "fastv"], "dart and fastv do not go together; a recipe has resize and one other reducer"),
        (5, "write it like {method: dart, keep: 0.5}"),
        ({"method": "dart", "keep": "half"}, "keep is 'half', should be a number"),
    ],
)
def test_problems_of_a_reducer_are_one_line(setup, text):
    with pytest.raises(UserError) as caught:
        resolve(BASE | {"reduce": setup})
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_name", "setup", "text"),
    [
        (
            "llava",
            {"reduce": "fastv:0.5,layer=1"},
            r"vLLM cannot serve 'fastv' \(it drops tokens within .*choose from coverage, .*or --set engine=transformers",
        ),
        ("llava", {"reduce": "fastv:0.5,layer=9", "engine": "transformers"}, "layer 9 is none of the language model's"),
        ("qwen2-5-vl", {"reduce": "visionzip:0.5"}, "encoder of qwen2-5-vl does not have; use coverage"),
    ],
)
def test_models_and_engines_without_the_method(models, model_name, setup, text):
    with pytest.raises(UserError, match=text):
        make_plan(recipe(models[model_name], **setup))


def test_methods_that_only_transformers_runs_are_written_for_it(models):
    assert make_plan(recipe(models["llava"], reduce="fastv:0.5,layer=1", engine="transformers")).problems == ()


@pytest.mark.parametrize(("model_name", "scheme"), [("llava", "none"), ("qwen2-5-vl", "fp8")])
def test_a_checkpoint_carries_its_reducer(models, tmp_path, model_name, scheme):
    """Besides its config it is what the same recipe without a reducer gives, and the doctor finds nothing."""
    out = tmp_path / "out"
    done = quantize(recipe(models[model_name], reduce="dart:0.25", scheme=scheme, out=str(out)))
    config = json.loads((out / "config.json").read_text())
    block = reducer_block.read_reducer(config)
    assert block is not None and block.reducer == choice.parse_reducer("dart:0.25")
    assert all(name.startswith("Vlmcompress") for name in config["architectures"])
    assert done.manifest["recipe"]["reduce"] == block.reducer.plain() == manifest.read_manifest(out)["recipe"]["reduce"]
    assert [check for check in doctor.diagnose(out, models[model_name]) if not check.ok] == []
    if scheme == "none":
        old, new = load_file(models[model_name] / "model.safetensors"), load_file(out / "model.safetensors")
        assert old.keys() == new.keys() and all(old[name].equal(new[name]) for name in old)


def test_a_reduced_original_needs_its_reducer_named(models, tmp_path, capsys):
    out = tmp_path / "out"
    quantize(recipe(models["llava"], reduce="dart:0.25", out=str(out)))
    with pytest.raises(UserError, match="carries the reducer dart:0.25; add --reduce dart:0.25, or another"):
        make_plan(recipe(out, scheme="rtn", options={"group_size": 32}))
    arguments = ["quantize", str(out), "--scheme", "none", "--reduce", "uniform:1/3", "-o", str(tmp_path / "two")]
    assert cli.main([*arguments, "--json"]) == 0
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["vlmcompress"]["reduce"]["method"] == "uniform"
    assert config["architectures"] == ["VlmcompressLlavaForConditionalGeneration"]
    capsys.readouterr()


@pytest.mark.parametrize("extra", [{}, {"vision": "fp8"}])
def test_unneeded_data_are_not_read(models, tmp_path, monkeypatch, extra):
    """No sample is encoded or run where no layer of the language model is quantized; the manifest notes it."""
    calibration_rows.write(tmp_path, 2, lambda i: f"{i}.png")
    monkeypatch.setattr(inputs, "encode_usable", lambda *_args, **_more: pytest.fail("samples were encoded"))
    keys = {"reduce": "dart:0.25", "calibrate": {"data": str(tmp_path / "calib.jsonl")}, "out": str(tmp_path / "out")}
    done = quantize(recipe(models["llava"], **keys, **extra))
    assert done.manifest["calibration"] is None
    assert [line for line in done.manifest["warnings"] if "the calibration data calib.jsonl were not read" in line]
    with pytest.raises(UserError, match="nowhere"):
        quantize(recipe(models["llava"], **keys | {"calibrate": {"data": "nowhere"}, "out": str(tmp_path / "no")}))

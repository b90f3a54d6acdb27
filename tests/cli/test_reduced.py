"""What a user reads of reduced checkpoints: plan, summary, card, doctor, check and next steps."""

from __future__ import annotations

import json

import pytest

from tests.kit import calibration_rows, tiny
from tests.kit.command_line import run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.build(name, folder / name) for name in ("llava", "qwen2-5-vl")}


def test_plan_summary_card_and_doctor_name_the_same_reducer(models, tmp_path, capsys):
    model, out = models["llava"], tmp_path / "out"
    common = ("quantize", model, "--scheme", "none", "--reduce", "dart:0.25")
    code, text, _ = run(capsys, *common, "--dry-run")
    assert code == 0 and "dart:0.25: 16 -> 4 visual tokens of a 1024x768 image" in text
    planned = json.loads(run(capsys, *common, "--dry-run", "--json")[1])
    assert planned["visual_tokens"] == {
        "image": "1024x768",
        "before": 16,
        "after": 4,
        "text": planned["visual_tokens"]["text"],
    }
    assert planned["recipe"]["reduce"]["method"] == "dart" and planned["origins"]["reduce.keep"] == "command line"
    code, text, _ = run(capsys, *common, "-o", out)
    assert code == 0 and "  images    dart:0.25: 16 -> 4 visual tokens of a 1024x768 image" in text
    assert f"vlmcompress serve {out}" in text
    card = (out / "README.md").read_text()
    assert "carries the reducer `dart:0.25`" in card and "4 of 16" in card
    assert "without its plugin vLLM refuses" in card and 'attach_carried(model, processor, "./out")' in card
    code, text, _ = run(capsys, "doctor", out, "--source", model)
    assert code == 0 and "dart:0.25, served by the plugin of vLLM" in text


def test_a_card_shows_how_to_send_a_share_to_a_reducer(models, tmp_path, capsys):
    """Not of one that only transformers runs."""
    reducer = "dart:0.5,keep_max=1"
    for engine, message in (("vllm", True), ("transformers", False)):
        arguments = ("--scheme", "none", "--reduce", reducer, "--set", f"engine={engine}", "--overwrite")
        assert run(capsys, "quantize", models["llava"], *arguments, "-o", tmp_path / "out")[0] == 0
        card = (tmp_path / "out" / "README.md").read_text()
        assert ('`"mm_processor_kwargs": {"keep": 0.75}`. vLLM takes such' in card) is message


def test_a_reducer_for_transformers_alone_is_not_offered_to_vllm(models, tmp_path, capsys):
    model, out = models["llava"], tmp_path / "out"
    arguments = ("quantize", model, "--scheme", "none", "--reduce", "fastv:0.5,layer=1", "--set", "engine=transformers")
    code, text, _ = run(capsys, *arguments, "-o", out)
    assert code == 0 and "vlmcompress serve" not in text and "--engine hf" in text
    card = (out / "README.md").read_text()
    assert (
        "vLLM does not load it: the reducer fastv:0.5,layer=1 runs in transformers only." in card
        and "vllm serve" not in card
    )
    code, text, _ = run(capsys, "doctor", out)
    assert code == 0 and "fastv:0.5,layer=1, for transformers only: vLLM cannot serve 'fastv'" in text


def test_a_checkpoint_without_a_reducer_mentions_none(models, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(capsys, "quantize", models["llava"], "--scheme", "fp8", "-o", out)[0] == 0
    card = (out / "README.md").read_text()
    assert "Visual tokens" not in card and "attach_carried" not in card and "vllm serve ./out" in card


def test_a_damaged_block_is_found_by_the_doctor(models, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(capsys, "quantize", models["llava"], "--scheme", "none", "--reduce", "dart", "-o", out)[0] == 0
    config = json.loads((out / "config.json").read_text())
    config["vlmcompress"]["reduce"]["keep"] = 7
    (out / "config.json").write_text(json.dumps(config))
    code, text, _ = run(capsys, "doctor", out)
    assert code == 2 and "PROBLEM  reducer" in text and "keep must be a number above 0 and at most 1, got 7" in text


@pytest.mark.parametrize(
    ("model", "arguments", "code", "message"),
    [
        (
            "llava",
            ["--reduce", "dart:0.5"],
            0,
            "vllm: visual tokens  dart:0.5: 16 -> 8 visual tokens of a 1024x768 image",
        ),
        ("llava", ["--reduce", "fastv:0.5,layer=1"], 2, "vLLM cannot serve 'fastv'"),
        ("llava", ["--reduce", "fastv:0.5,layer=1", "--engine", "transformers"], 0, "transformers: visual tokens"),
        (
            "llava",
            ["--reduce", "dart:0.5", "--engine", "sglang"],
            2,
            "sglang does not know the reducer of a checkpoint",
        ),
        ("qwen2-5-vl", ["--reduce", "visionzip:0.5"], 2, "does not have; use coverage"),
    ],
)
def test_check(models, capsys, model, arguments, code, message):
    data, text, _ = run(capsys, "check", models[model], "--scheme", "none", *arguments)
    assert data == code and message in text


def test_eval_attaches_only_to_transformers(models, capsys):
    code, _, message = run(capsys, "eval", models["llava"], "--reduce", "dart:0.5")
    assert code == 2 and "add --engine hf" in message
    code, _, message = run(capsys, "eval", models["llava"])
    assert code == 2 and "missing --baseline; name the original" in message
    code, _, message = run(capsys, "eval", models["llava"], "--engine", "hf", "--reduce", "dart:2")
    assert code == 2 and "keep must be a number above 0" in message
    code, _, message = run(capsys, "eval", models["qwen2-5-vl"], "--engine", "hf", "--reduce", "visionzip")
    assert code == 2 and "--reduce visionzip:1/3: 'visionzip' reads attention from CLS" in message


def test_two_stages_are_planned_calibrated_and_written(models, tmp_path, capsys):
    """The share is measured on the calibration images."""
    model, out = models["qwen2-5-vl"], tmp_path / "out"
    rows = calibration_rows.write(tmp_path, 4, side=224)
    both = ("--reduce", "resize:0.5", "--reduce", "uniform:0.5")
    code, text, _ = run(capsys, "quantize", model, "--scheme", "int8", *both, "--calib", rows, "--dry-run")
    assert code == 0 and "resize:0.5 + uniform:0.5" in text
    code, text, _ = run(capsys, "quantize", model, "--scheme", "int8", *both, "--calib", rows, "-o", out)
    record = json.loads((out / "vlmcompress.json").read_text())
    assert code == 0 and record["recipe"]["resize"]["keep"] == 0.5
    tokens, example = record["recipe"]["resize"]["tokens"], record["visual_tokens"]
    assert f"resize:0.5,tokens={tokens} + uniform:0.5: {example['before']} -> {example['after']} visual" in text
    config = json.loads((out / "config.json").read_text())
    assert config["vlmcompress"]["reduce"] == {"method": "uniform", "keep": 0.5}
    assert f"at most {tokens} visual tokens, in engines that follow it" in (out / "README.md").read_text()
    assert run(capsys, "doctor", out, "--source", model)[0] == 0


def test_a_share_of_images_needs_images(models, tmp_path, capsys):
    arguments = ("quantize", models["qwen2-5-vl"], "--scheme", "none", "-o", tmp_path / "out")
    code, _, err = run(capsys, *arguments, "--reduce", "resize:0.5")
    assert code == 2 and "resize:0.5 needs calibration images" in err
    code, _, err = run(capsys, *arguments, "--reduce", "resize:tokens=4")
    assert code == 0, err

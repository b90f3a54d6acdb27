"""A budget of bits: sizes to the byte, mixed checkpoints that load, refusals that name what is possible."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from tests.kit import calibration_rows, forks, tiny
from vlmcompress import cli, models
from vlmcompress.cli import quantize as command
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.export import manifest
from vlmcompress.quantization import allocate
from vlmcompress.quantization.plan import make_plan
from vlmcompress.quantization.plan.examine import examine
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils import folders, locks
from vlmcompress.utils.errors import UserError

DECODER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A tiny model and calibration data."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 4)
    tiny.build("llava", folder / "llava")
    return folder


def recipe(world: Path, out: Path | None, bits: dict, scheme: str = "gptq", **overrides):
    keys = {"model": str(world / "llava"), "scheme": scheme, "bits": bits}
    keys["calibrate"] = {"data": str(world / "calib.jsonl"), "samples": 4}
    if scheme in ("gptq", "awq", "rtn"):
        keys["options"] = {"group_size": 32}
    return resolve(keys | ({"out": str(out)} if out else {}) | overrides).recipe


def decoder_bits(out: Path, source: Path) -> float:
    """Stored bits per weight of the decoder's linear layers, from the files themselves."""
    before, after = models.tensor_headers(source), models.tensor_headers(out)
    sizes = {"I64": 8, "I32": 4, "I8": 1, "BF16": 2, "F8_E4M3": 1}
    linear = [n.removesuffix(".weight") for n in before if "language_model" in n and n.split(".")[-2] in DECODER]
    decoder = [entry for n, entry in after.items() if n.rpartition(".")[0] in linear]
    nbytes = sum(sizes[entry["dtype"]] * int(np.prod(entry["shape"])) for entry in decoder)
    return 8 * nbytes / sum(int(np.prod(before[f"{n}.weight"]["shape"])) for n in linear)


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
def test_a_budget_is_kept_to_the_byte_and_loads(world, tmp_path, scheme):
    out = tmp_path / "out"
    done = quantize(recipe(world, out, {"budget": 3.9}, scheme))
    allocation = done.manifest["allocation"]
    assert decoder_bits(out, world / "llava") == pytest.approx(allocation["bits"], abs=1e-4)
    assert 3.5 < allocation["bits"] <= 3.9
    widths = {(entry["block"], entry["group"]): entry["width"] for entry in allocation["groups"]}
    assert len(set(widths.values())) > 1
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {group["weights"]["num_bits"] for group in config["config_groups"].values()} == set(
        map(int, widths.values())
    )
    _, info = AutoModelForImageTextToText.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert all(entry.ok for entry in doctor.diagnose(out, world / "llava"))


def test_the_least_predicted_error_of_all_that_fit(world, tmp_path):
    """Oracle: no single change of a group to another width that fits predicts less; and it beats a width for all."""
    base = recipe(world, tmp_path / "out", {"budget": 3.9})
    work = make_plan(base)
    assert work.budget
    allocation = quantize(base).manifest["allocation"]
    errors = {(entry["block"], entry["group"]): entry["predicted"] for entry in allocation["groups"]}
    chosen = {(entry["block"], entry["group"]): entry["width"] for entry in allocation["groups"]}
    sizes = work.budget.sizes
    assert sum(sizes[key][name] for key, name in chosen.items()) == allocation["bytes"] <= work.budget.nbytes
    for key, name in chosen.items():
        for other, error in errors[key].items():
            if error < errors[key][name]:
                assert allocation["bytes"] - sizes[key][name] + sizes[key][other] > work.budget.nbytes
    assert allocation["predicted"] == pytest.approx(sum(errors[key][name] for key, name in chosen.items()))
    three = allocation["uniform"]["3"]
    assert three["bits"] <= 3.9 and allocation["predicted"] < three["predicted"]


def test_a_budget_allocated_without_answers_is_reported(world, tmp_path, capsys):
    """Relative output errors are what is left without gradients; a rule that reads no errors has nothing to say."""
    rows = [json.loads(line) for line in (world / "calib.jsonl").read_text().splitlines()]
    mute = world / "mute.jsonl"
    mute.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "answer"}) + "\n" for row in rows))
    for by, reported in (("error", True), ("luq", False)):
        settings = {"calibrate": {"data": str(mute), "samples": 4}}
        done = quantize(recipe(world, tmp_path / by, {"budget": 3.9, "by": by}, **settings))
        assert ("sample has an answer, so" in capsys.readouterr().err) is reported
        assert done.manifest["allocation"]["unit"] == "relative squared output error"


@pytest.mark.parametrize("bits", [{"max_size": "1.6MB", "among": [4, "fp8", "bf16"]}, {"max_size": "1.38MB"}])
def test_the_size_of_the_whole(world, tmp_path, bits):
    done = quantize(recipe(world, tmp_path / "out", bits))
    written = done.manifest["size"]["weights_after"]
    limit = float(bits["max_size"].removesuffix("MB")) * 1e6
    assert 0.97 * limit < written <= limit
    assert make_plan(recipe(world, None, bits)).bytes_after >= written
    _, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info


def test_ranking_by_entropy(world, tmp_path, monkeypatch):
    real, facts = allocate._predicted, []
    monkeypatch.setattr(allocate, "_predicted", lambda *arguments: facts.append(real(*arguments)) or facts[0])
    done = quantize(recipe(world, tmp_path / "out", {"budget": 3.9, "by": "luq", "among": [2, 4]}))
    allocation, entropy = done.manifest["allocation"], facts[0]["entropy"]
    mean = {}
    for entry in allocation["groups"]:
        mean.setdefault(entry["block"], []).append(int(entry["width"]))
    ranked = sorted(mean, key=lambda block: entropy[block])
    averages = [sum(mean[block]) / len(mean[block]) for block in ranked]
    assert averages == sorted(averages) and averages[0] < averages[-1]


def test_gradients_are_collected_once(world, tmp_path, monkeypatch):
    """A balance by gradients needs them for its own sake, too; those of the statistics serve it."""
    from vlmcompress.quantization.calibration import gradient_pass as sensitivity

    calls, real = [], sensitivity.gradients
    monkeypatch.setattr(
        sensitivity, "gradients", lambda *args, **overrides: calls.append(1) or real(*args, **overrides)
    )
    keys = {"options": {"group_size": 32, "balance": "mbq"}}
    done = quantize(recipe(world, tmp_path / "out", {"budget": 3.9}, **keys))
    assert done.manifest["allocation"]["unit"] == "nats" and calls == [1]


def test_a_data_free_scheme_has_widths_from_data(world, tmp_path):
    done = quantize(recipe(world, tmp_path / "out", {"budget": 4.0}, "rtn"))
    widths = Counter(entry["width"] for entry in done.manifest["allocation"]["groups"])
    assert len(widths) > 1
    printed = command.text(command.result(done.out, "model", done.manifest, 1.0))
    assert all(f"{count} in {width} bits" in printed for width, count in widths.items())


def test_interrupted_and_resumed(world, tmp_path):
    """Killed after the errors were predicted: the second run keeps them, and its files are those of an unbroken run."""
    whole, out = tmp_path / "whole", tmp_path / "broken"
    quantize(recipe(world, whole, {"budget": 3.9}))
    command = [
        forks.python(*forks.OURS),
        "-m",
        "vlmcompress",
        "quantize",
        str(world / "llava"),
        "--scheme",
        "gptq",
        "-o",
        str(out),
    ]
    command += ["--set", "options.group_size=32", "--set", "bits.budget=3.9", "--calib", str(world / "calib.jsonl")]
    command += ["--samples", "4"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    hidden = tmp_path / ".broken.work" / "predicted.json"
    while not hidden.exists() and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    with locks.held(folders.staging_path(out, "lock"), "waiting", wait=True):  # the program's fork ends a little later
        pass
    assert hidden.exists() and not out.exists()
    kept = hidden.stat().st_mtime_ns
    captured = []
    quantize(recipe(world, out, {"budget": 3.9}), progress=lambda *what: captured.append(what[0]))
    assert "predicting" not in captured and "gradients" not in captured and "calibrating" in captured
    assert not hidden.exists() and kept
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert manifest.read_manifest(whole)["allocation"] == manifest.read_manifest(out)["allocation"]


@pytest.mark.parametrize(
    ("bits", "extra", "message"),
    [
        (
            {"budget": 1.5},
            {},
            r"bits.budget 1.5 can't be met with widths 2, 3, 4, 8; the smallest reachable is 2.5\d* bits",
        ),
        ({"max_size": "10KB"}, {}, r"bits.max_size 10KB can't be met .* the smallest reachable is [\d.]+MB, of which"),
        ({"budget": 4, "among": [2, 4]}, {"target": "cpu"}, "bits.among has 2, and vLLM's CPU build runs weight-only"),
        (
            {"budget": 4, "among": [4, 8]},
            {"scheme": "fp8", "options": {}},
            "scheme 'fp8' has one width only; take one of awq",
        ),
        (
            {"budget": 4, "by": "luq"},
            {"options": {}, "scheme": "mbq"},
            "searches that re-run blocks",
        ),
    ],
)
def test_refusals_of_a_plan(world, bits, extra, message):
    keys = {"scheme": "gptq", **extra}
    with pytest.raises(UserError, match=message):
        make_plan(recipe(world, None, bits, **keys))


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ({}, "bits is {}, it should have one of budget"),
        ({"budget": 3, "max_size": "1GB"}, "it should have one of budget .* and max_size"),
        (
            {"budget": 3, "among": [1]},
            "bits.among is .*it should have whole numbers from 2 to 8, fp8, int8, bf16, and has 1",
        ),
        ({"budget": 3, "among": ["fp-8"]}, "did you mean 'fp8'"),
        ({"budget": 3, "among": [4, 4]}, "should name each width once"),
        ({"budget": 3, "by": "eror"}, "bits.by is .*it should be one of error, luq$"),
        ({"budget": 0}, "bits.budget is 0, it should be greater than 0"),
        ({"max_size": "big"}, 'bits.max_size is "big", it should be a size like 5GB'),
        ({"size": "1GB"}, "unknown key 'bits.size'"),
    ],
)
def test_refusals_of_a_recipe(world, bits, message):
    with pytest.raises(UserError, match=message):
        recipe(world, None, bits)


def test_widths_follow_the_target(world):
    assert list(make_plan(recipe(world, None, {"budget": 6}, target="cpu")).budget.widths) == ["4", "int8"]
    assert list(make_plan(recipe(world, None, {"budget": 6}, target="h100")).budget.widths) == ["2", "3", "4", "8"]
    assert list(make_plan(recipe(world, None, {"budget": 6})).budget.widths) == ["2", "3", "4", "8"]


def test_check_and_dry_run(world, tmp_path, capsys):
    checks = examine(recipe(world, None, {"budget": 1.5})).findings
    assert any("smallest reachable" in check.detail for check in checks if not check.ok)
    command = ["quantize", str(world / "llava"), "--scheme", "gptq", "--set", "options.group_size=32"]
    assert cli.main([*command, "--set", "bits.budget=3.9", "--calib", str(world / "calib.jsonl"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "to be allocated" in text and "decides the widths" in text

"""From a tiny checkpoint to a written one: every scheme, interruption at any moment, and byte-identical weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import weakref
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Value
from datasets import Video as VideoFeature
from safetensors.torch import load_file, save_file

from tests.kit import calibration_rows, forks, tiny
from tests.kit.pictures import film
from vlmcompress import cli, models
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.quantization import run
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils import folders, locks
from vlmcompress.utils.errors import UserError

SCHEMES = {
    "rtn": {},
    "gptq": {"group_size": 64},
    "awq": {"group_size": 32},
    "mbq": {"group_size": 32, "objective": "gram"},
    "int8": {},
    "fp8": {},
    "fp8-static": {},
    "w8a16": {},
}


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """A folder with tiny models and calibration data."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 6, lambda i: [] if i == 0 else ["1.png", "0.png"] if i == 1 else f"{i}.png")
    tiny.build("qwen2-5-vl", folder / "qwen")
    tiny.build("llava", folder / "llava")
    return folder


def recipe(world: Path, out: Path, scheme: str, model: str = "llava", **overrides):
    keys = {"model": str(world / model), "out": str(out), "scheme": scheme}
    keys["calibrate"] = {"data": str(world / "calib.jsonl"), "samples": 6}
    return resolve(keys | overrides).recipe


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("model", [pytest.param("qwen", marks=pytest.mark.slow), "llava"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_whole_and_loads(world, tmp_path, model, scheme):
    """The doctor finds nothing, transformers reloads without a missing key, and the answer's logits stay close."""
    out = tmp_path / "out"
    result = quantize(recipe(world, out, scheme, model, options=SCHEMES[scheme]))
    failed = [check for check in doctor.diagnose(out, source=world / model) if not check.ok]
    assert not failed, failed
    errors = result.manifest["errors"]
    assert errors and all({"text", "vision", "answer"} <= set(error) for error in errors.values())
    assert result.manifest["calibration"]["samples"] == 6
    assert not list(tmp_path.glob(".out*")), "something was left next to OUT"


def test_layers_are_fitted_to_so_many_tokens(world, tmp_path):
    """The manifest counts them. 0, as many as there are, and on few samples the default are all: the same bytes."""

    def run(name: str, **tokens: int) -> tuple[dict, dict[str, bytes]]:
        calibrate = {"data": str(world / "calib.jsonl"), "samples": 6, **tokens}
        out = tmp_path / name
        made = quantize(recipe(world, out, "gptq", options={"group_size": 64}, calibrate=calibrate))
        return made.manifest["calibration"], weights(out)

    read, every = run("default")
    total = sum(read["tokens"].values())
    for name, tokens in (("all", 0), ("as many", total)):
        again, same = run(name, tokens=tokens)
        assert same == every and "fitted" not in read | again
    read, other = run("half", tokens=total // 2)
    assert other != every and sum(read["fitted"].values()) == total // 2
    assert all(abs(read["fitted"][name] - count / 2) < 1.5 for name, count in read["tokens"].items())


@pytest.mark.parametrize("samples", [2, 6])
def test_no_gram_matrix_is_added_up_for_errors_of_other_samples(world, tmp_path, monkeypatch, samples):
    """A scheme that reads maxima alone reports the errors of held-out samples; without any it needs the matrix for them."""
    needs, solve = set(), run._solve

    def watched(vlm, groups, stats, *rest):
        needs.update(*(each.needs for each in stats.values()))
        return solve(vlm, groups, stats, *rest)

    monkeypatch.setattr(run, "_solve", watched)
    calibrate = {"data": str(world / "calib.jsonl"), "samples": samples}
    manifest = quantize(recipe(world, tmp_path / "out", "int8", calibrate=calibrate)).manifest
    assert needs == {"absmax"} | ({"gram"} if not manifest["calibration"]["held_out"] else set())
    assert all({"text", "vision", "answer"} <= set(error) for error in manifest["errors"].values())


@pytest.mark.slow
def test_videos_calibrate(world, tmp_path):
    """In each kind of table; counted in the manifest, and their tokens are vision: as many as the processor's grid has."""
    film(tmp_path / "film.mp4", 40)
    part = {"type": "video", "video": "film.mp4"}
    turns = [
        {"role": "user", "content": [part, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
    ]
    rows = [{"messages": turns}, {"video": "film.mp4", "question": "<video> why?", "answer": "so"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list([{"messages": turns}] * 2).to_parquet(tmp_path / "a.parquet")
    content = {"bytes": (tmp_path / "film.mp4").read_bytes(), "path": None}
    features = Features(video=VideoFeature(decode=False), question=Value("string"), answer=Value("string"))
    saved = Dataset.from_list([{"video": content, "question": "what?", "answer": "x"}] * 2, features=features)
    saved.save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "a.parquet", "saved"):
        out = tmp_path / f"out of {name}"
        calibrate = {"data": str(tmp_path / name), "samples": 2}
        manifest = quantize(recipe(world, out, "gptq", "qwen", calibrate=calibrate)).manifest
        facts = manifest["calibration"]
        assert (facts["samples"], facts["images"], facts["videos"]) == (2, 0, 1)
        pairs = 10 // 2  # 2 a second, of 5 s
        assert facts["tokens"]["vision"] == 2 * pairs * 4 * 6 // 4  # samples of 4 x 6 patches, by squares of 4
        assert all(error["vision"] > 0 for error in manifest["errors"].values())
        assert "no sample" not in " ".join(manifest["warnings"])


def test_the_vision_tower_and_the_kv_cache_are_quantized(world, tmp_path):
    out = tmp_path / "out"
    quantize(recipe(world, out, "rtn", "qwen", vision="fp8", kv_cache="fp8"))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 2 and config["kv_cache_scheme"]["num_bits"] == 8
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.0.self_attn.k_scale"].item() > 0
    assert any("visual" in name and tensor.dtype == torch.float8_e4m3fn for name, tensor in stored.items())
    assert not [check for check in doctor.diagnose(out) if not check.ok]


def test_layers_that_stay_as_they_are_take_part_in_smoothing(world, tmp_path):
    """Qwen3.5: what a norm was divided by is in every layer that reads it, those left in 16 bits too; attention alone has
    scales of keys and values."""
    source = tiny.build("qwen3-5", tmp_path / "source")
    out = tmp_path / "out"
    quantize(recipe(world, out, "awq", str(source), kv_cache="fp8", options={"group_size": 32}))
    assert not [check for check in doctor.diagnose(out, source=source) if not check.ok]
    old, new = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    block = "model.language_model.layers.0."
    norm = f"{block}input_layernorm.weight"
    scale = (1 + old[norm].float()) / (1 + new[norm].float())
    assert scale.max() > 1.1 * scale.min()
    for name in ("in_proj_a", "in_proj_b"):
        key = f"{block}linear_attn.{name}.weight"
        assert torch.allclose(new[key].float(), old[key].float() * scale, rtol=2**-7, atol=0)
    assert [name for name in new if name.endswith("k_scale")] == ["model.language_model.layers.1.self_attn.k_scale"]


@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_equal_inputs_give_equal_bytes_even_after_an_interruption(world, tmp_path, scheme):
    """Stop in the middle of the second block, go on with the same command: the weights equal those of a run in one piece."""
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    options = {"options": {"group_size": 64}}
    quantize(recipe(world, whole, scheme, **options))

    def stop(label: str, done: int, total: int) -> None:
        if label == "calibrating" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(recipe(world, halved, scheme, **options), progress=stop)
    assert not halved.exists()
    assert len(list((tmp_path / ".halved.work").glob("layer-*.safetensors"))) == 1
    quantize(recipe(world, halved, scheme, **options))
    assert weights(halved) == weights(whole)
    assert not (tmp_path / ".halved.work").exists()


def test_finished_weight_files_are_kept(world, tmp_path, monkeypatch):
    """Without data nothing but weight files is kept: those that were finished are not written again, the bytes and errors are
    those of a run in one piece, and a file that was begun is not left."""
    whole, halved, kept = tmp_path / "whole", tmp_path / "halved", tmp_path / ".halved.work"
    options = {"options": {"group_size": 32}, "calibrate": {}, "shard_size": "100KB"}
    expected = quantize(recipe(world, whole, "rtn", **options)).manifest
    assert len(weights(whole)) > 4 and all(error["weight"] > 0 for error in expected["errors"].values())
    solve, rounded, last = run.solve_block, [], 6

    def counted(groups, *rest):
        rounded.append(groups[0])
        if len(rounded) == last:
            raise KeyboardInterrupt
        return solve(groups, *rest)

    monkeypatch.setattr(run, "solve_block", counted)
    with pytest.raises(KeyboardInterrupt):
        quantize(recipe(world, halved, "rtn", **options))
    finished = weights(kept)
    assert finished and not list(kept.glob("*.part")) and not halved.exists()
    manifest = quantize(recipe(world, halved, "rtn", **options)).manifest
    assert weights(halved) == weights(whole) and finished.items() <= weights(whole).items()
    assert list(manifest["errors"].items()) == list(expected["errors"].items())
    assert last < len(rounded) < last + 8 and not kept.exists()


def test_statistics_of_finished_blocks_are_freed(world, tmp_path, monkeypatch):
    """Gram matrices are the largest thing in memory: a block's must be gone before the next one is solved."""
    references: list[weakref.ref] = []
    solve = run.solve_block

    def solve_block(groups, weights, stats, *extra):
        assert stats and not any(old() is not None for old in references)
        references.extend(weakref.ref(group_stats) for group_stats in stats.values())
        return solve(groups, weights, stats, *extra)

    monkeypatch.setattr(run, "solve_block", solve_block)
    quantize(recipe(world, tmp_path / "out", "gptq", options={"group_size": 64}))
    assert len(references) >= 8  # four groups a block


@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_killed_at_any_moment(world, tmp_path, signal_number):
    """OUT is not there after `kill -9`, Ctrl-C or `kill`, and the same command finishes the work."""
    out = tmp_path / "out"
    command = ["quantize", str(world / "llava"), "-o", str(out), "--scheme", "gptq"]
    command += ["--calib", str(world / "calib.jsonl"), "--samples", "6"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    # Nice, so that on a busy machine it does not end before this process sees it work.
    slow = ["nice", "-n", "19", forks.python(*forks.OURS), "-m", "vlmcompress", *command]
    process = subprocess.Popen(slow, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".out.work/layer-0000*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal_number)
    _, line = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.fail("the run ended before it could be killed")
    with locks.held(folders.staging_path(out, "lock"), "waiting", wait=True):  # the program's fork ends a little later
        pass
    assert not out.exists()
    if signal_number != signal.SIGKILL:
        assert (
            process.returncode == 128 + signal_number
            and "the same command goes on from here" in line
            and "Traceback" not in line
        )
    assert cli.main(command) == 0
    assert not [check for check in doctor.diagnose(out) if not check.ok]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "options",
    [
        {"activations": 8, "bits": 8},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"group_size": 32}, {"activations": 8})),
    ],
    ids=str,
)
def test_mbq_as_published(world, tmp_path, options):
    """By block output: whole, smoothed otherwise than by Gram matrices, and little worse on the outputs of single layers; with
    8-bit weights most of the error is that of rounding inputs."""
    manifest = quantize(recipe(world, tmp_path / "out", "mbq", "qwen", options=options)).manifest
    assert not [check for check in doctor.diagnose(tmp_path / "out", source=world / "qwen") if not check.ok]
    wide = {key: value for key, value in options.items() if key != "activations"} | {"objective": "gram"}
    wide |= {} if "group_size" in wide else {"group_size": -1, "symmetric": True}
    other = quantize(recipe(world, tmp_path / "gram", "mbq", "qwen", options=wide)).manifest
    errors = [sum(error["vision"] for error in each["errors"].values()) for each in (manifest, other)]
    if options.get("bits") == 8:
        assert errors[1] < errors[0] < 5 * errors[1]
    else:
        assert errors[0] == pytest.approx(errors[1], rel=0.25) and errors[0] != errors[1]


def test_needs_calibration_data(world, tmp_path):
    keys = {"model": str(world / "llava"), "out": str(tmp_path / "out"), "scheme": "awq"}
    with pytest.raises(UserError, match="--calib"):
        quantize(resolve(keys).recipe)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["gptq", "awq", "int8"])
def test_balance(world, tmp_path, scheme):
    """Other weights than without, a checkpoint that is whole, and a manifest that records it."""
    plain, balanced = tmp_path / "plain", tmp_path / "balanced"
    arguments = dict(SCHEMES[scheme])
    quantize(recipe(world, plain, scheme, options=arguments | {"balance": "off"}))
    record = quantize(recipe(world, balanced, scheme, options=arguments | {"balance": "ratio"})).manifest
    assert record["recipe"]["options"]["balance"] == "ratio"
    assert weights(plain) != weights(balanced)
    assert not [check for check in doctor.diagnose(balanced, source=world / "llava") if not check.ok]
    default = quantize(recipe(world, tmp_path / "default", scheme, options=arguments))
    assert weights(default.out) == weights(plain)


def test_gptq_after_the_scales_of_awq(world, tmp_path):
    """The chain of smoothing, searched ranges, feedback and local search gives a whole checkpoint whose norms are divided;
    it collects what both read, and a balance weighs both."""
    steps = {"group_size": 64, "smooth": "awq", "clip": True, "sweeps": 1}
    norms = []
    for balance in ("off", "ratio"):
        out = tmp_path / balance
        quantize(recipe(world, out, "gptq", options=steps | {"balance": balance}))
        assert not [check for check in doctor.diagnose(out, source=world / "llava") if not check.ok]
        stored = load_file(out / "model.safetensors")
        norms.append({name: tensor for name, tensor in stored.items() if name.endswith("input_layernorm.weight")})
    old = load_file(world / "llava" / "model.safetensors")
    assert any(not torch.equal(old[name], tensor) for name, tensor in norms[0].items())
    assert any(not torch.equal(norms[1][name], tensor) for name, tensor in norms[0].items())


@pytest.mark.parametrize(
    ("keep", "balance", "message"),
    [
        ("image", "ratio", "no answer tokens, which options.balance weighs; add an `answer` to each sample"),
        ("answer", "ratio", "no vision tokens, which options.balance weighs; add images"),
        ("neither", {"text": 0, "vision": 1, "answer": 1}, "no vision and no answer tokens"),
        ("image", {"text": 1, "vision": 1, "answer": 0}, None),
    ],
)
def test_balance_needs_the_modalities_it_weighs(world, tmp_path, keep, balance, message):
    """Calibration data without images or answers are refused by name, unless their weight is 0."""
    rows = [{"id": str(i), "question": f"what is it {i}"} for i in range(3)]
    rows = [row | {"image": str(world / "2.png")} if keep == "image" else row for row in rows]
    rows = [row | {"answer": "red"} if keep == "answer" else row for row in rows]
    data = tmp_path / "part.jsonl"
    data.write_text("".join(json.dumps(row | ({} if keep == "image" else {"image": None})) + "\n" for row in rows))
    keys = {"calibrate": {"data": str(data)}, "options": {"balance": balance, "group_size": 64}}
    work = recipe(world, tmp_path / "out", "gptq", **keys)
    if message is None:
        quantize(work)
        return
    with pytest.raises(UserError, match=message):
        quantize(work)
    assert not (tmp_path / "out").exists()


def test_infinite_activations_name_the_layer(world, tmp_path):
    """Finite weights whose products overflow: the message names layer and sample."""
    model = tmp_path / "model"
    tiny.build("llava", model)
    tensors = load_file(model / "model.safetensors")
    tensors["language_model.model.layers.1.input_layernorm.weight"].fill_(3e38)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    work = recipe(world, tmp_path / "out", "gptq").model_copy(update={"model": model})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.q_proj.*sample 0"):
        quantize(work)
    assert not (tmp_path / "out").exists()


def test_refusals_write_nothing(world, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="does not divide"):
        quantize(recipe(world, out, "rtn", options={"group_size": 96}))
    with pytest.raises(UserError, match="fuse"):
        quantize(recipe(world, out, "rtn", skip=["up_proj"]))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_untouched(world, tmp_path):
    out = tmp_path / "out"
    quantize(recipe(world, out, "rtn"))
    before = weights(out)
    with pytest.raises(UserError, match="--overwrite"):
        quantize(recipe(world, out, "fp8"))
    assert weights(out) == before
    quantize(recipe(world, out, "fp8"), overwrite=True)
    assert weights(out) != before


def test_skipped_layers_stay(world, tmp_path):
    out = tmp_path / "out"
    quantize(recipe(world, out, "rtn", skip=[r"layers\.0\."]))
    source, stored = load_file(world / "llava" / "model.safetensors"), load_file(out / "model.safetensors")
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(source[name], stored[name])
    assert "language_model.model.layers.1.mlp.up_proj.weight_packed" in stored
    assert not [check for check in doctor.diagnose(out) if not check.ok]
    assert models.read_config(out)["quantization_config"]["ignore"]


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        ("model.language_model.layers.1.mlp.up_proj", "up_proj: the weight holds NaN"),
        ("model.vision_tower.vision_model.encoder.layers.1.mlp.fc1", "fc1.weight' holds NaN"),
        ("embed_tokens", "embed_tokens: the weight holds NaN"),
    ],
)
def test_weights_that_are_no_numbers(world, tmp_path, broken, line):
    """Without data a weight is read once, when it is rounded or copied, and nothing is written where it holds NaN."""
    model = tiny.build("llava", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".".join(broken.split(".")[-3:]) + ".weight"))
    tensors[name][-1, -1] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=line):
        quantize(
            resolve({"model": str(model), "out": str(tmp_path / "out"), "scheme": "fp8", "embeddings": "w8a16"}).recipe
        )
    assert not (tmp_path / "out").exists()

"""Statistics on disk: those of the plain model, the same weights as from memory, interruption at any moment, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import calibration_rows, forks, tiny
from tests.kit.work import begun
from vlmcompress import cli, models
from vlmcompress.cli import _process as terminal
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import encode, load_samples
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization import inputs
from vlmcompress.quantization.calibrate import calibrate, collect
from vlmcompress.quantization.calibration import statistics_folder
from vlmcompress.quantization.calibration.block_store import load_block
from vlmcompress.quantization.calibration.solve import apply, solve_block
from vlmcompress.quantization.inputs import Inputs
from vlmcompress.quantization.plan.plan import make_plan
from vlmcompress.quantization.run import Run, quantize, quantize_blocks
from vlmcompress.recipe import resolve
from vlmcompress.utils.work_folder import WorkFolder

NAMES = ("llava", "qwen2-5-vl")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Tiny models, calibration data (with a sample of text alone), and the models' statistics."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 5, lambda i: f"{i}.png" if i else [])
    for name in NAMES:
        tiny.build(name, folder / name)
        calibrate(recipe(folder, name, folder / f"{name}-stats", kv_cache="fp8"))
    return folder


def recipe(world: Path, model: str, out: Path, scheme: str = "none", **overrides):
    keys = {"model": str(world / model), "out": str(out), "scheme": scheme}
    keys["calibrate"] = {"data": str(world / "calib.jsonl"), "samples": 5}
    return resolve(keys | overrides).recipe


def stored(world: Path, model: str, out: Path, scheme: str, **overrides):
    """A recipe that uses the statistics and names no data."""
    return recipe(world, model, out, scheme, **{"calibrate": {"stats": str(world / f"{model}-stats")}, **overrides})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def observed(folder: Path, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, GroupStats]]:
    """The oracle: the plain model runs once over each sample, and hooks add up what its layers get."""
    vlm = models.load(folder)
    blocks, modality = decoder_blocks(vlm.model, vlm.spec), torch.zeros(1)
    collected: list[dict[str, Collector]] = [{} for _ in blocks]

    def watch(collector: Collector):
        return lambda _module, args: collector.add(args[0], modality)

    for layer, groups in enumerate(blocks):
        for group in groups:
            linear = vlm.model.get_submodule(group.linears[0])
            collected[layer][group.name] = Collector(linear.in_features, ("gram", "absmax", "absmean"))
            linear.register_forward_pre_hook(watch(collected[layer][group.name]))
    for batch in batches:
        modality = batch["modality"]
        with torch.no_grad():
            vlm.model(**{key: value for key, value in batch.items() if key != "modality"})
    return [{name: collector.finish() for name, collector in collectors.items()} for collectors in collected]


@pytest.mark.parametrize("model", NAMES)
def test_statistics_are_those_of_the_plain_model(world, model):
    """To the rounding of activations, which a plain run rounds more often. Counts are equal."""
    batches = encode(load_samples(world / "calib.jsonl", samples=5, seed=0), models.load(world / model))
    kept = statistics_folder.read_statistics(world / f"{model}-stats")
    near = {"rtol": 3e-2, "atol": 1e-2}
    for layer, expected in enumerate(observed(world / model, batches)):
        loaded_block, _ = kept.load(layer)
        assert loaded_block.keys() == expected.keys() and expected
        for group, stats in expected.items():
            assert loaded_block[group].count == stats.count and min(stats.count.values()) > 0
            for name in ("text", "vision", "answer"):
                ours, theirs = loaded_block[group].gram({name: 1.0}), stats.gram({name: 1.0})
                assert (ours - theirs).norm() < 0.02 * theirs.norm()
            torch.testing.assert_close(loaded_block[group].absmax(), stats.absmax(), **near)
            torch.testing.assert_close(loaded_block[group].absmean(), stats.absmean(), **near)


def test_ranges_of_keys_and_values(world, tmp_path):
    """The first block's are those of the sequential run, whose first block stands after nothing quantized, too."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    quantize(stored(world, "qwen2-5-vl", ours, "rtn", kv_cache="fp8"))
    quantize(recipe(world, "qwen2-5-vl", theirs, "rtn", kv_cache="fp8"))
    tensors, expected = (load_file(out / "model.safetensors") for out in (ours, theirs))
    for name in ("k_scale", "v_scale"):
        key = f"model.layers.0.self_attn.{name}"
        assert torch.equal(tensors[key], expected[key]) and tensors[key].item() > 0


def test_the_folder_describes_its_statistics(world):
    facts = json.loads((world / "llava-stats" / statistics_folder.NAME).read_text())
    assert facts["calibration"]["prefix"] == "float" and facts["calibration"]["samples"] == 5
    assert facts["needs"] == ["absmax", "absmean", "gram"] and facts["kv_cache"] is True
    assert "tokenizer.json" in facts["processor"] and len(facts["model"]["weights_sha256"]) == 64
    assert sorted(facts["files"]) == [f"layer-{i:04d}.safetensors" for i in range(len(facts["blocks"]))]
    assert not list(world.glob(".*")), "something was left next to the statistics"


SCHEMES = {"rtn": {}, "gptq": {"group_size": 64}, "awq": {"group_size": 32}, "int8": {}, "fp8-static": {}}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_solved_from_them(world, tmp_path, scheme):
    """Byte for byte what `solve_block` makes of the stored statistics, without the model having been run."""
    chosen = stored(world, "llava", tmp_path / "out", scheme, options=SCHEMES[scheme])
    result = quantize(chosen)
    assert not [check for check in doctor.diagnose(tmp_path / "out", source=world / "llava") if not check.ok]
    assert result.manifest["calibration"]["prefix"] == "float"
    assert (
        result.manifest["calibration"]["statistics_sha256"]
        == statistics_folder.read_statistics(world / "llava-stats").sha256
    )
    assert all({"text", "vision", "answer"} == set(error) for error in result.manifest["errors"].values())


def test_weights_are_equal_with_statistics_from_disk_and_memory(world, tmp_path, monkeypatch):
    """Statistics that never were on disk (their run collected anew) give the same stored blocks, smoothing included."""
    vlm = models.load(world / "llava")
    plan = make_plan(stored(world, "llava", tmp_path / "out", "awq", options={"group_size": 32}))
    kept, work = Memory(), begun(tmp_path / "store")
    batches = encode(load_samples(world / "calib.jsonl", samples=5, seed=0), vlm)
    with monkeypatch.context() as patch:
        patch.setattr("vlmcompress.quantization.calibrate.save_statistics", kept.save)
        blocks = decoder_blocks(vlm.model, vlm.spec)
        collect(plan.recipe, Inputs(vlm, batches, None), blocks, begun(tmp_path / "unused"))
    fresh = models.load(world / "llava")
    quantize_blocks(Run(plan=plan, recipe=plan.recipe, work=work, vlm=fresh), Inputs(fresh, [], None))
    for layer, groups in enumerate(decoder_blocks(vlm.model, vlm.spec)):
        modules = {name: vlm.model.get_submodule(name) for g in groups for name in (*g.linears, g.smooth) if name}
        device = kept.stats[layer][groups[0].name].gram().device
        weights = {name: modules[name].weight.to(device) for g in groups for name in g.linears}
        norms = {g.smooth: modules[g.smooth].weight.to(device) for g in groups if g.smooth_kind == "norm"}
        expected = solve_block(groups, weights, kept.stats[layer], plan.method, torch.bfloat16, norms=norms)
        apply(expected, modules)
        loaded_block = load_block(work, layer)
        assert loaded_block.smoothing and loaded_block.errors.keys() == expected.errors.keys()
        for name, errors in expected.errors.items():  # computed from rows, or from their Gram matrix
            assert loaded_block.errors[name] == pytest.approx(errors, rel=1e-5)
        assert all(torch.equal(loaded_block.smoothing[op], scale.cpu()) for op, scale in expected.smoothing.items())
        for name, weight in expected.weights.items():
            loaded_weight = loaded_block.weights[name]
            assert torch.equal(loaded_weight.q, weight.q.cpu())
            assert torch.equal(loaded_weight.scale, weight.scale.cpu())


class Memory:
    """A store that keeps statistics as they are."""

    def __init__(self) -> None:
        self.stats: dict[int, dict[str, GroupStats]] = {}

    def save(self, _work: WorkFolder, layer: int, stats: dict[str, GroupStats], _kv_scales: dict) -> None:
        self.stats[layer] = dict(stats)


def test_statistics_of_finished_blocks_are_freed(world, tmp_path, monkeypatch):
    """Memory holds the Gram matrices of one block: those of the block before are gone when the next is kept."""
    references: list[weakref.ref] = []
    save = statistics_folder.save_statistics

    def watched(work, layer, stats, kv_scales):
        assert stats and not any(old() is not None for old in references)
        references.extend(weakref.ref(group_stats) for group_stats in stats.values())
        save(work, layer, stats, kv_scales)

    monkeypatch.setattr("vlmcompress.quantization.calibrate.save_statistics", watched)
    calibrate(recipe(world, "llava", tmp_path / "stats"))
    assert len(references) == 9  # four groups in each of two blocks, and the head


def test_no_forward_pass_and_no_encoding(world, tmp_path, monkeypatch):
    def never(*_args, **_kwargs):
        raise AssertionError("the model was run")

    monkeypatch.setattr(torch.nn.Linear, "forward", never)
    monkeypatch.setattr(inputs, "encode_usable", never)
    quantize(stored(world, "llava", tmp_path / "out", "gptq", options={"group_size": 64}))


def test_the_forms_agree_on_the_first_block_and_differ_after_it(world, tmp_path):
    float_, quantized = tmp_path / "float", tmp_path / "quantized"
    options = {"group_size": 64}
    a = quantize(stored(world, "llava", float_, "gptq", options=options)).manifest
    b = quantize(recipe(world, "llava", quantized, "gptq", options=options)).manifest
    assert (a["calibration"]["prefix"], b["calibration"]["prefix"]) == ("float", "quantized")
    first, second = load_file(float_ / "model.safetensors"), load_file(quantized / "model.safetensors")
    same = {name: torch.equal(first[name], second[name]) for name in first if name.endswith("weight_packed")}
    assert all(equal for name, equal in same.items() if ".layers.0." in name)
    assert not all(equal for name, equal in same.items() if ".layers.1." in name)


def test_skipped_layers_need_no_other_statistics(world, tmp_path):
    out = tmp_path / "out"
    quantize(stored(world, "llava", out, "awq", options={"group_size": 32}, skip=[r"layers\.0\.", "down_proj"]))
    assert not [check for check in doctor.diagnose(out, source=world / "llava") if not check.ok]


def test_an_interrupted_run_gives_the_same_statistics(world, tmp_path):
    """Collecting, then solving, each stopped in the second block: files equal those of runs in one piece."""
    stats, out = tmp_path / "stats", tmp_path / "out"

    def stop(label: str, done: int, total: int) -> None:
        if done > total // 2 and label in ("calibrating", "quantizing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe(world, "llava", stats, kv_cache="fp8"), progress=stop)
    assert not stats.exists() and len(files(tmp_path / ".stats.work")) == 1
    first = (tmp_path / ".stats.work" / "layer-0000.safetensors").stat().st_mtime_ns
    calibrate(recipe(world, "llava", stats, kv_cache="fp8"))
    assert files(stats) == files(world / "llava-stats")
    assert (stats / "layer-0000.safetensors").stat().st_mtime_ns == first, "the first block was collected again"

    chosen = stored(world, "llava", out, "awq", options={"group_size": 32})
    with pytest.raises(KeyboardInterrupt):
        quantize(chosen, progress=stop)
    assert not out.exists() and files(tmp_path / ".out.work")
    quantize(chosen)
    quantize(stored(world, "llava", tmp_path / "whole", "awq", options={"group_size": 32}))
    assert files(out) == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stats", "whole"]


def test_a_killed_run_continues(world, tmp_path, capfd):
    """`kill -9` in the second block leaves no STATS, and the same command finishes them."""
    stats = tmp_path / "stats"
    command = ["calibrate", str(world / "llava"), "-o", str(stats), "--samples", "5", "--kv-cache", "fp8"]
    command += ["--calib", str(world / "calib.jsonl")]
    code = (
        "import os, signal, sys; from vlmcompress import cli; from vlmcompress.utils import progress\n"
        "def stop(self, label, done, total):\n"
        "    if label == 'calibrating' and done > total // 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "progress.ProgressBar.__call__ = stop\n"
        "cli.main(sys.argv[1:])"
    )
    killed = subprocess.run([forks.python(*forks.OURS), "-c", code, *command], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL and not stats.exists()
    assert cli.main([*command, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["calibration"]["tokens"]["vision"] > 0 and printed["bytes"] == sum(map(len, files(stats).values()))
    assert [path.name for path in tmp_path.iterdir()] == ["stats"]
    assert {name for name in os.listdir(stats)} == {*files(stats), statistics_folder.NAME}


def test_the_data_may_be_repeated_with_from_statistics(world, tmp_path):
    both = {"stats": str(world / "llava-stats"), "data": str(world / "calib.jsonl"), "samples": 5}
    quantize(stored(world, "llava", tmp_path / "out", "int8", calibrate=both))


def test_maxima_alone(world, tmp_path):
    """Without Gram matrices they are small and serve the schemes that need none."""
    stats = tmp_path / "stats"
    calibrate(recipe(world, "llava", stats), needs=("absmax",))
    whole = sum(map(len, files(world / "llava-stats").values()))
    assert sum(map(len, files(stats).values())) < whole / 4
    result = quantize(stored(world, "llava", tmp_path / "out", "int8", calibrate={"stats": str(stats)}))
    assert all(list(error) == ["weight"] for error in result.manifest["errors"].values())
    quantize(stored(world, "llava", tmp_path / "full", "int8"))
    assert files(tmp_path / "out") == files(tmp_path / "full")


def test_dry_run_and_check_name_the_form_of_statistics(world, capfd, monkeypatch):
    monkeypatch.setattr(terminal, "quiet_libraries", lambda: None)
    model, stats = str(world / "llava"), str(world / "llava-stats")
    common = [model, "--scheme", "gptq", "--set", "options.group_size=64"]
    for extra, prefix in ((["--stats", stats], "float"), (["--calib", str(world / "calib.jsonl")], "quantized")):
        assert cli.main(["quantize", *common, *extra, "--dry-run", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["prefix"] == prefix
        assert cli.main(["quantize", *common, *extra, "--dry-run"]) == 0
        assert f"{prefix}: blocks are solved after" in capfd.readouterr().out
    assert cli.main(["check", *common, "--stats", stats]) == 0
    assert "statistics of 5 samples of 'calib.jsonl'" in capfd.readouterr().out

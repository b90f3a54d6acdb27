"""Gradients on their way to a balance: MBQ's rule, the statistics' file, and `quantize` with and without statistics."""

from __future__ import annotations

import json
import statistics as arithmetic
from pathlib import Path

import pytest
import torch

from tests.kit import tiny
from tests.kit.pictures import file_of, picture, refused
from vlmcompress import cli, models
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import encode, load_samples
from vlmcompress.numerics.statistics.gradients import Gradient, Gradients, sensitivities
from vlmcompress.quantization.calibrate import calibrate
from vlmcompress.quantization.calibration import statistics_folder
from vlmcompress.quantization.calibration.block_store import load_block
from vlmcompress.quantization.calibration.gradient_pass import gradients
from vlmcompress.quantization.calibration.solve import QuantMethod, solve_block
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.work_folder import WorkFolder


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A tiny model, calibration data and data without answers."""
    folder = tmp_path_factory.mktemp("world")
    rows = [{"image": f"{i}.png", "question": "what is it", "answer": "a red one"[: 3 + i]} for i in range(3)]
    for i in range(3):
        (folder / f"{i}.png").write_bytes(file_of(picture(56, 56, seed=i)))
    for name, keys in (("calib", ("image", "question", "answer")), ("silent", ("image", "question"))):
        lines = [json.dumps({key: row[key] for key in keys}) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    tiny.build("qwen2-5-vl", folder / "model")
    calibrate(recipe(folder, folder / "stats"), needs=("gram", "absmax", "absmean", "gradient"))
    return folder


def recipe(world: Path, out: Path, scheme: str = "none", data: str | None = "calib", **overrides):
    settings = {"data": str(world / f"{data}.jsonl")} if data else {"stats": str(world / "stats")}
    keys = {"model": str(world / "model"), "out": str(out), "scheme": scheme, "calibrate": settings}
    return resolve(keys | overrides).recipe


def test_gradients_follow_mbqs_definition():
    """The ratio at the module's last layer, no less than the median over blocks."""

    def gradient(channels: int, vision: float, answer: float, square: float) -> Gradient:
        return Gradient(channels, {"vision": vision, "answer": answer}, {"vision": square, "answer": 1.0})

    blocks, groups = [], []
    for layer, (attention, mlp) in enumerate([(0.5, 3.0), (0.25, 1.0), (2.0, 7.0), (1.0, 2.0)]):
        name = f"model.layers.{layer}"
        linears = {
            f"{name}.self_attn.q_proj": gradient(30, 9.0, 1.0, 2.0),
            f"{name}.self_attn.k_proj": gradient(10, 9.0, 1.0, 6.0),
            f"{name}.self_attn.o_proj": gradient(30, attention * 4, 4.0, 5.0),
            f"{name}.mlp.up_proj": gradient(50, 9.0, 1.0, 1.0),
            f"{name}.mlp.down_proj": gradient(30, mlp * 2, 2.0, 3.0),
        }
        q, k, o, up, down = linears
        blocks.append(linears)
        groups.append({"qkv": [q, k], "o": [o], "gate_up": [up], "down": [down]})
    groups[3] = {"qkv": ["model.layers.3.self_attn.k_proj"]}  # the rest is not needed
    computed = sensitivities(Gradients(0.0, 1, blocks), groups)
    assert computed.keys() == {(layer, name) for layer in range(4) for name in groups[layer]}
    attention, mlp = arithmetic.median([0.5, 0.25, 2.0, 1.0]), arithmetic.median([3.0, 1.0, 7.0, 2.0])
    for layer, (ratio, other) in enumerate([(0.5, 3.0), (0.25, 1.0), (2.0, 7.0)]):
        assert computed[layer, "qkv"].rho == computed[layer, "o"].rho == max(ratio, attention)
        assert computed[layer, "gate_up"].rho == computed[layer, "down"].rho == max(other, mlp)
    assert computed[3, "qkv"].rho == 1.0


def test_gradients_are_stored_with_the_statistics(world):
    vlm = models.load(world / "model")
    batches = encode(load_samples(world / "calib.jsonl", samples=128, seed=0), vlm)
    expected = gradients(vlm, batches)
    kept = statistics_folder.read_statistics(world / "stats")
    assert kept.gradients == expected and kept.facts["needs"] == ["absmax", "absmean", "gradient", "gram"]
    weights = sensitivities(
        expected, [{g.name: g.linears for g in groups} for groups in decoder_blocks(vlm.model, vlm.spec)]
    )
    for layer in range(len(expected.blocks)):  # after them is the head, which has no gradient
        stats, _ = kept.load(layer)
        assert {name: group_stats.sensitivity for name, group_stats in stats.items()} == {
            name: weights[layer, name] for name in kept.facts["blocks"][layer]
        }


@pytest.mark.parametrize("scheme", ["gptq", "awq", "int8"])
def test_quantize_reads_stored_gradients(world, tmp_path, scheme):
    """With statistics and without, the first block (which stands after nothing quantized in both) is the same, and it is
    what the balance written as weights gives."""
    options = {} if scheme == "int8" else {"group_size": 64 if scheme == "gptq" else 32}
    weights, stores = {}, {}
    for form, data in (("stored", None), ("sequential", "calib")):
        work = recipe(world, tmp_path / form, scheme, data, options={**options, "balance": "mbq"})
        stores[form] = first_block(work, tmp_path)
    stats, _ = statistics_folder.read_statistics(world / "stats").load(0)
    for group, group_stats in stats.items():
        weights[group] = {"text": 0.0, "vision": group_stats.sensitivity.rho, "answer": 1.0}
    vlm = models.load(world / "model")
    module = work.method
    plain = QuantMethod(module, module.Options(**options))
    others = {(0, g): QuantMethod(module, module.Options(**options, balance=w)) for g, w in weights.items()}
    groups = decoder_blocks(vlm.model, vlm.spec)[0]
    linears = {name: vlm.model.get_parameter(f"{name}.weight") for group in groups for name in group.linears}
    norms = {g.smooth: vlm.model.get_parameter(f"{g.smooth}.weight") for g in groups if g.smooth_kind == "norm"}
    weighed, fresh = (
        QuantMethod(module, plain.options, others),
        statistics_folder.read_statistics(world / "stats").load(0)[0],
    )
    expected = solve_block(groups, linears, stats, weighed, torch.bfloat16, None, norms)
    off = solve_block(groups, linears, fresh, plain, torch.bfloat16, None, norms)
    for stored in stores.values():
        assert all(torch.equal(stored.weights[name].q, weight.q) for name, weight in expected.weights.items())
        assert not all(torch.equal(stored.weights[name].q, weight.q) for name, weight in off.weights.items())


def first_block(work, tmp_path: Path):
    """What a run stores for the first block; it is stopped when it has the second one."""
    kept = WorkFolder(work.out)

    def stop(_label: str, done: int, total: int) -> None:
        if kept.has("layer-0000"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(work, progress=stop)
    kept.begin({})
    return load_block(kept, 0)


def test_checkpoints_are_equal_with_stored_gradients(world, tmp_path):
    """To the end, and the same bytes after an interruption, whose gradients are not computed again."""
    work = recipe(world, tmp_path / "out", "gptq", options={"group_size": 64, "balance": "mbq"})
    quantize(work)
    again = recipe(world, tmp_path / "again", "gptq", options={"group_size": 64, "balance": "mbq"})
    first_block(again, tmp_path)
    kept = json.loads((tmp_path / ".again.work" / "gradients.json").read_text())["data"]
    assert Gradients.from_dict(kept) == statistics_folder.read_statistics(world / "stats").gradients
    labels = set()
    quantize(again, progress=lambda label, _done, _total: labels.add(label))
    assert "calibrating" in labels and "gradients" not in labels
    names = ("model.safetensors", "config.json")
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in names)
    quantize(recipe(world, tmp_path / "stored", "gptq", None, options={"group_size": 64, "balance": "mbq"}))


def test_an_interrupted_calibrate_continues_after_the_gradient_pass(world, tmp_path):
    def stop(label: str, done: int, _total: int) -> None:
        if label == "calibrating" and done:
            raise KeyboardInterrupt

    work, labels = recipe(world, tmp_path / "stats"), set()
    needs = ("absmax", "gradient")
    with pytest.raises(KeyboardInterrupt):
        calibrate(work, needs=needs, progress=stop)
    calibrate(work, needs=needs, progress=lambda label, _done, _total: labels.add(label))
    assert "gradients" not in labels
    assert (
        statistics_folder.read_statistics(tmp_path / "stats").gradients
        == statistics_folder.read_statistics(world / "stats").gradients
    )


def test_samples_without_answers_are_refused(world, tmp_path):
    """What schemes read without options is collected by default; what can't be had is refused on request."""
    command = ["calibrate", str(world / "model"), "--calib", str(world / "silent.jsonl"), "-o", str(tmp_path / "all")]
    assert cli.main(command) == 0
    assert statistics_folder.read_statistics(tmp_path / "all").facts["needs"] == ["absmax", "absmean", "gram"]
    work = recipe(world, tmp_path / "asked", data="silent")
    refused(lambda: calibrate(work, needs=("absmax", "gradient")), "no calibration sample has an answer")
    work = recipe(world, tmp_path / "out", "gptq", "silent", options={"group_size": 64, "balance": "mbq"})
    refused(lambda: quantize(work), "no answer tokens", "options.balance")
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


def test_statistics_without_gradients_are_refused(world, tmp_path):
    calibrate(recipe(world, tmp_path / "stats"))
    base = recipe(world, tmp_path / "out", "gptq", None, options={"group_size": 64, "balance": "mbq"})
    base = base.model_copy(update={"calibrate": base.calibrate.model_copy(update={"stats": str(tmp_path / "stats")})})
    refused(lambda: quantize(base), "needs gradient, too; calibrate again with --needs absmax,absmean,gradient,gram")


def test_damaged_gradients_are_refused(world, tmp_path):
    calibrate(recipe(world, tmp_path / "stats"), needs=("absmax", "gradient"))
    path = tmp_path / "stats" / statistics_folder.NAME
    facts = json.loads(path.read_text())
    for broken in (None, [], {"loss": 1.0, "samples": 1}, {"loss": 1.0, "samples": 1, "blocks": [{"x": {"y": 1}}]}):
        path.write_text(json.dumps(facts | {"gradients": broken}))
        refused(lambda: statistics_folder.read_statistics(tmp_path / "stats"), "gradients", "; calibrate again")

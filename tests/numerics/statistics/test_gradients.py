"""Gradients on their way to a balance: MBQ's rule, the statistics' file, and `quantize` with and without statistics."""

from __future__ import annotations

import json
import statistics as arithmetic
from pathlib import Path

import pytest

from tests.kit import tiny
from tests.kit.pictures import file_of, picture
from vlmcompress import cli, models
from vlmcompress.models.data import encode, load_samples
from vlmcompress.numerics.statistics.gradients import Gradient, Gradients, sensitivities
from vlmcompress.quantization.calibration.block_store import load_block
from vlmcompress.quantization.calibration.gradient_pass import gradients
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
    return folder


def recipe(world: Path, out: Path, scheme: str = "none", data: str = "calib", **overrides):
    settings = {"data": str(world / f"{data}.jsonl")}
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
    vlm = models.load(world / "model")
    assert Gradients.from_dict(kept) == gradients(
        vlm, encode(load_samples(world / "calib.jsonl", samples=128, seed=0), vlm)
    )
    labels = set()
    quantize(again, progress=lambda label, _done, _total: labels.add(label))
    assert "calibrating" in labels and "gradients" not in labels
    names = ("model.safetensors", "config.json")
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in names)


def test_samples_without_answers_are_refused(world, tmp_path, capsys):
    command = ["quantize", str(world / "model"), "--calib", str(world / "silent.jsonl"), "-o", str(tmp_path / "out")]
    assert cli.main([*command, "--scheme", "gptq", "--set", "options.balance=mbq"]) == 2
    assert "have no answer tokens, which options.balance weighs" in capsys.readouterr().err

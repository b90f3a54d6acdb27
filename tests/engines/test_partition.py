"""Layers split among devices: the oracle is vLLM's own check of what one device has."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.kit import tiny
from tests.kit.engine import asked
from vlmcompress import cli
from vlmcompress.engines.vllm.partition import FusedLayer, device_counts, fits, fitting_size, partition_problem
from vlmcompress.models import Group
from vlmcompress.numerics import Format, Scheme

WIDTHS = (1536, 3456, 4864, 8960, 9728, 11008, 14336, 18944, 25600, 27648, 29568)  # of published decoders
GROUPS = (("down", 1), ("gate_up", 2), ("o", 1))


def layer(name, rows, inputs, weights):
    group = Group(0, name, tuple(f"layers.0.{name}.{index}" for index in range(len(rows))), fused=len(rows) > 1)
    return FusedLayer(group, tuple((count, inputs) for count in rows), Scheme(weights))


@pytest.mark.engine
def test_refusals_are_those_of_vllm():
    formats = [Format("int", 4, size) for size in (-1, 16, 32, 64, 128, 256)] + [Format("float", 8, 128, rows=128)]
    layers, jobs = [], []
    for width, (name, count), weights, devices in itertools.product(WIDTHS, GROUPS, formats, (1, 2, 4, 8)):
        rows, inputs = ([2048] * count, width) if name != "gate_up" else ([width] * count, 2048)
        if width % devices or width % max(weights.group, 1):
            continue  # no model that runs on one device
        layers.append((layer(name, rows, inputs, weights), devices))
        split = "outputs" if name == "gate_up" else "inputs"
        jobs.append(
            {
                "rows": rows,
                "inputs": inputs,
                "split": split,
                "devices": devices,
                "group": weights.group,
                "block": weights.rows,
            }
        )
    (answer,) = asked("partition", [{"layers": jobs}])
    refused = [text is not None for text in answer["refused"]]
    assert [not fits(*pair) for pair in layers] == refused
    assert 100 < sum(refused) < len(refused) - 100


def test_the_size_that_is_proposed_is_the_largest_that_fits():
    for width, devices in itertools.product(WIDTHS, (2, 4, 8)):
        down = layer("down", [2048], width, Format("int", 4, 128))
        if width % devices or width % 128 or fits(down, devices):
            continue
        size = fitting_size([down], devices)
        fitting = [g for g in (64, 32) if (width // devices) % g == 0]
        assert size == max(fitting, default=-1)
        assert f"options.group_size={size}" in partition_problem([down], devices) and "--tp" in partition_problem(
            [down], devices
        )
    assert fitting_size([layer("down", [2048], 1216, Format("float", 4, 16))], 8) is None


def test_blocks_that_do_not_divide_are_named():
    """Of outputs, of inputs, and where not even one device has whole blocks."""
    blocks = Format("float", 8, 128, rows=128)
    assert "576 of 1,152 outputs, which blocks of 128" in str(
        partition_problem([layer("gate_up", [1152] * 2, 2048, blocks)], 2)
    )
    assert "576 of the 1,152 inputs, which groups of 128" in str(
        partition_problem([layer("down", [2048], 1152, blocks)], 2)
    )
    assert str(partition_problem([layer("gate_up", [200] * 2, 2048, blocks)], 2)).endswith("; use another scheme")


def test_a_device_has_a_head_of_keys_at_least():
    """Two heads of 128 on four devices: each has one, whole, which blocks of 128 rows do not tear."""
    blocks = Scheme(Format("float", 8, 128, rows=128))
    group = Group(0, "qkv", ("q", "k", "v"), fused=True)
    qkv = FusedLayer(group, ((2048, 2048), (256, 2048), (256, 2048)), blocks, head=128)
    assert device_counts([qkv]) == [1, 2, 4, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model 128 wide: two devices have 64 of the inputs of `o_proj`, which groups of 128 do not divide."""
    return tiny.build("llava", tmp_path_factory.mktemp("torn") / "model")


def run(capsys, *arguments):
    code = cli.main([*map(str, arguments)])
    return code, *capsys.readouterr()


def test_commands_refuse_a_partition_before_a_run(model, tmp_path, capsys):
    code, text, _ = run(capsys, "check", model, "--scheme", "rtn", "--tp", "2")
    assert code == 2 and "o_proj has 64 of the 128 inputs, which groups of 128 do not divide" in text
    assert "quantize with --set options.group_size=64, or use --tp 1" in text
    assert run(capsys, "check", model, "--scheme", "rtn", "--set", "options.group_size=64", "--tp", "2")[0] == 0
    out = tmp_path / "out"
    code, _, error = run(capsys, "quantize", model, "-o", out, "--scheme", "rtn", "--tp", "2")
    assert code == 2 and not out.exists() and error.count("\n") == 1 and "options.group_size=64" in error
    code, text, _ = run(capsys, "quantize", model, "-o", out, "--scheme", "rtn")
    assert code == 0 and "devices   1 can share it in vLLM" in text
    manifest = json.loads((out / "vlmcompress.json").read_text())
    assert manifest["devices"] == [1]
    code, _, error = run(capsys, "serve", out, "--", "--tensor-parallel-size", "2")
    assert code == 2 and "groups of 128" in error and error.count("\n") == 1
    code, _, error = run(capsys, "plan", out, "--tp", "2")
    assert code == 2 and "groups of 128" in error


def test_a_plan_takes_the_groups_that_fit(model, capsys):
    """On two devices 64, on four 32; the command that is shown has them, and is one that runs."""
    for devices, size in ((2, 64), (4, 32)):
        data = json.loads(run(capsys, "plan", model, "--tp", devices, "--target", "rtx4090", "--json")[1])
        row = {row["name"]: row for row in data["formats"]}["gptq-plus"]
        assert row["options"] == {"group_size": size} and row["weights"] and f" g{size} " in row["label"]
        assert (
            data["recommended"] != "gptq-plus" or f"--set options.group_size={size} --tp {devices}" in data["quantize"]
        )


def test_a_tower_that_cannot_be_split_is_copied(tmp_path, capsys):
    """Qwen2.5-VL-3B's tower is 3,420 wide, which eight devices do not divide."""
    folder = tiny.build("qwen2-5-vl", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["intermediate_size"] = 3420
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(config | {"text_config": wide(config["text_config"])}))
    data = json.loads(run(capsys, "plan", bare, "--tp", "8", "--memory", "80GB", "--json")[1])
    assert {"name": "--mm-encoder-tp-mode", "value": "data"}.items() <= data["serve"][1].items()


def wide(text):
    """The text model with heads and widths for eight devices."""
    return text | {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 1024}

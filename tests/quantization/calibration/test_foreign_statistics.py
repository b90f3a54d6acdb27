"""Statistics on disk that do not belong, are damaged or lack something: refused in one line, and nothing is written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.kit import calibration_rows, tiny
from tests.kit.work import begun, little_room
from vlmcompress import cli, models
from vlmcompress.cli import _process as terminal
from vlmcompress.cli.calibrate import STATISTICS
from vlmcompress.models import decoder_blocks
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.quantization.calibrate import KINDS, calibrate, gram_bytes, statistics_needed
from vlmcompress.quantization.calibration import statistics_folder
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import Recipe, resolve
from vlmcompress.utils.errors import UserError


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A tiny model, calibration data and the model's statistics."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 5)
    tiny.build("llava", folder / "llava")
    calibrate(recipe(folder, folder / "llava-stats", kv_cache="fp8"))
    return folder


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """Keep this process's logging as it is."""
    monkeypatch.setattr(terminal, "quiet_libraries", lambda: None)


def recipe(world: Path, out: Path, scheme: str = "none", **overrides) -> Recipe:
    keys = {"model": str(world / "llava"), "out": str(out), "scheme": scheme}
    return resolve(keys | {"calibrate": {"data": str(world / "calib.jsonl"), "samples": 5}} | overrides).recipe


@pytest.fixture
def spoiled(world, tmp_path) -> Path:
    """A copy of a model, its statistics and its data, to be changed."""
    for name in ("llava", "llava-stats"):
        shutil.copytree(world / name, tmp_path / name)
    for path in (*world.glob("*.png"), world / "calib.jsonl"):
        shutil.copy(path, tmp_path)
    return tmp_path


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def other_weights(folder: Path) -> list[str]:
    """The same shapes, another number in one tensor: only a hash of all weights can tell."""
    path = folder / "llava" / "model.safetensors"
    tensors = load_file(path)
    tensors["language_model.model.norm.weight"][0] += 1
    save_file(tensors, path, {"format": "pt"})
    return []


def other_config(folder: Path) -> list[str]:
    edit(folder / "llava" / "config.json", vision_feature_layer=-1)
    return []


def other_tokenizer(folder: Path) -> list[str]:
    edit(folder / "llava" / "tokenizer_config.json", anything=1)
    return []


def other_data(folder: Path) -> list[str]:
    Image.new("RGB", (56, 56), "red").save(folder / "1.png")
    return ["--calib", str(folder / "calib.jsonl")]


def other_version(folder: Path) -> list[str]:
    path = folder / "llava-stats" / statistics_folder.NAME
    edit(path, created_by=json.loads(path.read_text())["created_by"] | {"transformers": "4.0.0"})
    return []


def later_schema(folder: Path) -> list[str]:
    edit(folder / "llava-stats" / statistics_folder.NAME, schema_version=3)
    return []


def damaged(folder: Path) -> list[str]:
    path = folder / "llava-stats" / "layer-0001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    return []


def cut(folder: Path) -> list[str]:
    path = folder / "llava-stats" / "layer-0001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return []


def no_folder(folder: Path) -> list[str]:
    shutil.rmtree(folder / "llava-stats")
    return []


def no_json(folder: Path) -> list[str]:
    (folder / "llava-stats" / statistics_folder.NAME).write_text("[1")
    return []


def no_blocks(folder: Path) -> list[str]:
    path = folder / "llava-stats" / statistics_folder.NAME
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "blocks"}))
    return []


def only_maxima(folder: Path) -> list[str]:
    edit(folder / "llava-stats" / statistics_folder.NAME, needs=["absmax"])
    return []


def no_ranges(folder: Path) -> list[str]:
    edit(folder / "llava-stats" / statistics_folder.NAME, kv_cache=False)
    return ["--kv-cache", "fp8"]


def other_samples(folder: Path) -> list[str]:
    return ["--samples", "4"]


def by_block(folder: Path) -> list[str]:
    return ["--scheme", "mbq"]


def another_prefix(folder: Path) -> list[str]:
    return ["--scheme", "qronos"]


REFUSED = {
    other_weights: r"another model: sha256 of weights is \w{12} for 'llava' and \w{12} for .*llava; calibrate",
    other_config: r"sha256 of config is \w{12} for 'llava' and \w{12} for",
    other_tokenizer: r"sha256 of tokenizer_config.json is \w{12} for 'llava' and \w{12} for",
    other_data: r"other data: sha256 of the samples is \w{12} for 'calib.jsonl' with seed 0 and \w{12} for .*leave out --calib",
    other_version: r"collected with transformers 4.0.0, here is 5",
    later_schema: r"schema 3, this vlmcompress reads 2",
    damaged: r"layer-0001.safetensors is damaged",
    cut: r"layer-0001.safetensors is missing or of another size",
    no_folder: r"has no statistics.json; give a folder written by",
    no_json: r"statistics.json is not readable",
    no_blocks: r"statistics.json: 'blocks' is missing; calibrate again",
    only_maxima: r"hold absmax and the scheme needs absmean, gram, too; calibrate again with --needs absmax,absmean,gram",
    no_ranges: r"no ranges of keys and values; calibrate with --kv-cache fp8",
    other_samples: r"calibrate.samples is 4 and statistics .* with 5; leave it out",
    by_block: r"objective 'mae' searches with the model itself",
    another_prefix: r"statistics .*llava-stats were collected without the cross-Gram matrix, .* leave out the statistics",
}


@pytest.mark.parametrize(("out", "message"), [("x/stats/out", "is inside the statistics"), ("x", "contains the stat")])
def test_statistics_are_not_written_into_or_over(spoiled, out, message):
    """Not even with --overwrite, where a checkpoint's folder holds them."""
    (spoiled / "x").mkdir()
    (spoiled / "x" / "vlmcompress.json").write_text("{}")
    (spoiled / "llava-stats").rename(spoiled / "x" / "stats")
    chosen = recipe(spoiled, spoiled / out, "fp8", calibrate={"stats": str(spoiled / "x" / "stats")})
    with pytest.raises(UserError, match=message):
        quantize(chosen, overwrite=True)
    assert statistics_folder.read_statistics(spoiled / "x" / "stats")


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_foreign_statistics_are_refused(spoiled, capfd, spoil):
    """Exit code 2, one line that names both, and nothing written."""
    command = ["quantize", str(spoiled / "llava"), "-o", str(spoiled / "out"), "--scheme", "awq"]
    command += ["--stats", str(spoiled / "llava-stats"), "--set", "options.group_size=32", *spoil(spoiled)]
    before = sorted(spoiled.rglob("*"))
    assert cli.main(command) == 2
    output = capfd.readouterr().err
    assert re.search(REFUSED[spoil], output) and output.startswith("error: ") and output.count("\n") == 1
    assert sorted(spoiled.rglob("*")) == before


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--needs", "gramm"], "--needs: no 'gramm'; did you mean 'gram'?"),
        (["--for", "gptk"], "--for: no scheme or rule for bits 'gptk'; did you mean 'gptq'?"),
        (["--for", "rtn,fp8"], "--for rtn,fp8: needs no statistics; quantize without --stats"),
        (["--for", "gptq", "--needs", "gram"], "not allowed with argument"),
        (["--set", "options.bits=4"], "--set options: no such key of calibrate"),
        (["--set", "calibrate.stats=x"], "no such key of calibrate"),
        (["--samples", "0"], "calibrate.samples is 0"),
        (["--calib", "/no/where.jsonl"], "/no/where.jsonl"),
        ([], "vlmcompress calibrate needs calibration images; name some with --calib"),
    ],
)
def test_bad_input_to_calibrate(world, tmp_path, capfd, extra, message):
    assert cli.main(["calibrate", str(world / "llava"), "-o", str(tmp_path / "stats"), *extra]) == 2
    output = capfd.readouterr().err
    assert message in output and output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_room(world, tmp_path, monkeypatch):
    """Found out before the model is run; the estimate is that of the written files, give or take their small tensors."""
    stats = tmp_path / "stats"
    calibrate(recipe(world, stats))
    written = sum(path.stat().st_size for path in stats.glob("*.safetensors"))
    vlm = models.load(world / "llava")
    assert 0.4 * written < gram_bytes(vlm, decoder_blocks(vlm.model, vlm.spec), 3) < written
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
    with pytest.raises(UserError, match=r"needs about .* has 1.00 kB free; choose another folder or leave out Gram"):
        calibrate(recipe(world, tmp_path / "more"))
    assert [path.name for path in tmp_path.iterdir()] == ["stats"]


def test_a_full_disk(tmp_path):
    """What safetensors reports as text is an error that names the file, and the block does not count as finished."""
    work = begun(tmp_path / "store")
    collector = Collector(256)
    collector.add(torch.ones(1, 256))
    with little_room(), pytest.raises(UserError, match="no space left while writing .*layer-0000"):
        statistics_folder.save_statistics(work, 0, {"qkv": collector.finish()}, {})
    assert not work.has("layer-0000")


def test_kinds_of_statistics_are_those_of_the_collector():
    assert frozenset(STATISTICS) == KINDS


def test_only_statistics_are_overwritten(world, tmp_path):
    stats = tmp_path / "stats"
    quantize(recipe(world, stats, "fp8"))
    with pytest.raises(UserError, match="not ours to overwrite"):
        calibrate(recipe(world, stats), overwrite=True)
    calibrate(recipe(world, tmp_path / "other"), needs=("absmax",))
    calibrate(recipe(world, tmp_path / "other"), needs=("absmean",), overwrite=True)
    assert statistics_folder.read_statistics(tmp_path / "other").facts["needs"] == ["absmean"]


def test_statistics_for_what_will_read_them(world, tmp_path):
    """`--for` collects what schemes, rules and balances read, together, and nothing else."""
    command = ["calibrate", str(world / "llava"), "--calib", str(world / "calib.jsonl"), "--samples", "2"]
    assert cli.main([*command, "-o", str(tmp_path / "stats"), "--for", "int8,mbq"]) == 0
    assert statistics_folder.read_statistics(tmp_path / "stats").facts["needs"] == [
        "absmax",
        "absmean",
        "gradient",
        "gram",
    ]
    assert statistics_needed(["gptq"]) == {"gram"} and statistics_needed(["error", "fp8"]) == {"gram"}
    assert statistics_needed(["gptq", "mbq", "luq"]) == {"gram", "absmean", "gradient", "entropy"}
    with pytest.raises(
        UserError, match="--for gptq,qronos: the cross-Gram matrix depends on the blocks quantized before"
    ):
        statistics_needed(["gptq", "qronos"])

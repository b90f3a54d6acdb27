"""The sweep: its figures are those of allocate and of finished checkpoints; choosing, plots and recipes that work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.kit import calibration_rows, tiny
from vlmcompress import cli
from vlmcompress.common.progress import silent
from vlmcompress.errors import UserError
from vlmcompress.planning.plan import make_plan
from vlmcompress.recipe import resolve
from vlmcompress.runs import allocate, sweep
from vlmcompress.runs.calibrate import calibrate
from vlmcompress.runs.sweep import Point


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A tiny model and its statistics, with gradients and without."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 4)
    tiny.build("llava", folder / "llava")
    for name, needs in (("stats", {"gram", "absmax", "absmean", "gradient"}), ("plain", {"gram", "absmean"})):
        keys = {"model": str(folder / "llava"), "out": str(folder / name), "scheme": "none"}
        keys["calibrate"] = {"data": str(folder / "calib.jsonl"), "samples": 4}
        calibrate(resolve(keys).recipe, needs=needs)
    return folder


def swept(world: Path, *arguments: str, stats: str = "stats") -> list[str]:
    return ["sweep", str(world / stats), str(world / "llava"), *arguments]


def test_points_are_what_their_recipes_give(world, tmp_path, capsys):
    """Oracle: a few points' recipes, planned or allocated on their own, have the same size to the byte and the same error."""
    assert cli.main(swept(world, "--json", "--rows", "64")) == 0
    printed = json.loads(capsys.readouterr().out)
    points = {point["name"]: point for point in printed["points"]}
    assert len(points) >= 40 and printed["unit"] == "nats per answer token"
    for name in ("gptq w3 g32 auto", "awq w4 g128 off", "rtn w8 channel", "fp8"):
        keys = {"model": str(world / "llava"), "calibrate": {"stats": str(world / "stats")}, **points[name]["recipe"]}
        assert make_plan(resolve(keys).recipe).bytes_after == points[name]["nbytes"]
    shared = points["gptq 4 bits g128 auto"]
    keys = {"model": str(world / "llava"), "calibrate": {"stats": str(world / "stats")}, **shared["recipe"]}
    planned = allocate.share_out(make_plan(resolve(keys).recipe), progress=silent)
    assert planned.bytes_after == shared["nbytes"]
    assert planned.allocation["predicted"] == pytest.approx(shared["error"], rel=1e-6)
    assert shared["bits"] == pytest.approx(planned.allocation["bits"], abs=1e-3)


def test_best_points_are_those_that_nothing_smaller_beats(world, capsys):
    assert cli.main(swept(world, "--json")) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    for point in points:
        beaten = any(
            (other["nbytes"], other["error"]) != (point["nbytes"], point["error"])
            and other["nbytes"] <= point["nbytes"]
            and other["error"] <= point["error"]
            for other in points
        )
        assert point["best"] != beaten or sum(p["error"] == point["error"] for p in points) > 1


def test_the_chosen_recipe_runs(world, tmp_path, capsys):
    file, page = tmp_path / "best.yaml", tmp_path / "plot.html"
    assert cli.main(swept(world, "--max-bits", "3.6", "--save", str(file), "--plot", str(page))) == 0
    text = capsys.readouterr().out
    assert "chosen" in text and str(file) in text
    chosen = yaml.safe_load(file.read_text())
    assert set(chosen) <= {"scheme", "options", "bits"}
    out = tmp_path / "out"
    command = ["quantize", str(world / "llava"), "--recipe", str(file), "--stats", str(world / "stats"), "-o", str(out)]
    assert cli.main(command) == 0
    html = page.read_text()
    assert "<svg" in html and "gptq 3.5 bits" in html and "http://" not in html.replace("http://www.w3.org", "")
    image = tmp_path / "plot.svg"
    assert cli.main(swept(world, "--plot", str(image))) == 0
    assert image.read_text().startswith("<svg") and 'xmlns="http://www.w3.org/2000/svg"' in image.read_text()


def test_without_gradients_or_maxima(world, capsys):
    assert cli.main(swept(world, "--json", stats="plain")) == 0
    printed = json.loads(capsys.readouterr().out)
    names = [point["name"] for point in printed["points"]]
    assert printed["unit"] == "relative squared output error"
    assert "gptq w4 g128 ratio" in names and not any("auto" in name or "mbq" in name for name in names)
    assert {"int8 off", "int8 ratio"} <= set(printed["left_out"])


def test_a_target_leaves_out_what_it_does_not_run(world, capsys):
    assert cli.main(swept(world, "--json", "--target", "cpu")) == 0
    printed = json.loads(capsys.readouterr().out)
    kinds = {(p["recipe"]["scheme"], p["recipe"]["options"].get("bits")) for p in printed["points"]}
    assert ("gptq", 4) in kinds and ("int8", None) in kinds
    assert not any(bits in (2, 3, 8) for _, bits in kinds)


def test_choosing():
    points = [Point("a", {}, 2.0, 20, 0.5), Point("b", {}, 3.0, 30, 0.2), Point("c", {}, 4.0, 40, 0.3)]
    assert sweep.choose(points).name == sweep.choose(points, budget=4).name == "b"
    assert sweep.choose(points, nbytes=29).name == "a"
    with pytest.raises(UserError, match="the smallest is 'a': 2 bits, 20 bytes"):
        sweep.choose(points, budget=1.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-bits", "3", "--max-size", "1MB"], "give one of --max-bits and --max-size"),
        (["--max-size", "1KB"], "no setting is that small; the smallest is"),
        (["--plot", "x.png"], "name it FILE.html or FILE.svg"),
        (["--save", "x.json"], "name it FILE.yaml"),
        (["--rows", "0"], "give at least 1"),
        (["--set", "options.bits=4"], "a sweep tries these itself"),
        (["--target", "h10"], "did you mean 'h100'"),
    ],
)
def test_wrong_use(world, capsys, arguments, message):
    assert cli.main(swept(world, *arguments)) == 2
    assert message in capsys.readouterr().err

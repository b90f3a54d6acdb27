"""`report --errors`: figures against hand-made manifests, and what balance does to real checkpoints of the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean

import pytest

from tests.kit import made_manifest
from tests.kit.command_line import loud  # noqa: F401
from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli
from vlmcompress.evaluation.report import layers
from vlmcompress.evaluation.report.layers import LayerErrors
from vlmcompress.export import manifest
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError

A, B = "model.language_model.layers.0.mlp.up_proj", "model.language_model.layers.1.mlp.up_proj"


def made(folder: Path, errors: object, **keys) -> Path:
    """A folder with a manifest of these errors."""
    folder.mkdir()
    calibration = {
        "source": "c",
        "sha256": "0",
        "samples": 3,
        "prefix": "quantized",
        "tokens": {"text": 9, "vision": 9},
    }
    content = made_manifest.manifest(**{"calibration": calibration, "errors": errors} | keys)
    (folder / manifest.MANIFEST).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path, Path]:
    """The demo model rounded, and by GPTQ without and with balance."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, extra in {
        "rounded": {"scheme": "rtn"},
        "unbalanced": {"scheme": "gptq"},
        "balanced": {"scheme": "gptq", "options": {"balance": "ratio"}},
    }.items():
        keys = {"model": str(DEMO_LLAVA), "out": str(folder / name), "calibrate": {"samples": 16}} | extra
        quantize(resolve(keys).recipe)
    return folder / "rounded", folder / "unbalanced", folder / "balanced"


def report(capfd, *arguments: object) -> dict:
    assert cli.main(["report", "--errors", *map(str, arguments), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_layer_errors_are_the_measured_ones(tmp_path, capfd):
    """Means, geometric means and counts, worst layer first."""
    before = made(tmp_path / "before", {A: {"text": 0.01, "vision": 0.04}, B: {"text": 0.02, "vision": 0.01}})
    after = made(tmp_path / "after", {A: {"text": 0.02, "vision": 0.01}, B: {"text": 0.08, "vision": 0.0}})
    (about,) = (figures := report(capfd, before))["checkpoints"]
    assert about["mean"] == {"text": 0.015, "vision": 0.025}
    assert [row["layer"] for row in figures["layers"]] == [A, B]
    two = report(capfd, before, after)
    assert [row["layer"] for row in two["layers"]] == [B, A]
    text, vision = two["change"]["text"], two["change"]["vision"]
    assert text["ratio"] == pytest.approx(geometric_mean([2, 4])) and (text["better"], text["worse"]) == (0, 2)
    # an error of zero has no factor
    assert vision["ratio"] == pytest.approx(0.25) and (vision["better"], vision["worse"]) == (2, 0)
    assert (vision["before"], vision["after"]) == (pytest.approx(0.025), pytest.approx(0.005))


def test_the_effect_of_a_balance_is_shown(checkpoints, capfd):
    """The manifests' errors, unchanged; balanced by ratio, the few answer tokens gain what the many visual ones lose."""
    _, off, ratio = checkpoints
    figures = report(capfd, off, ratio)
    recorded = [json.loads((folder / manifest.MANIFEST).read_text())["errors"] for folder in (off, ratio)]
    for number, errors in enumerate(recorded):
        assert {row["layer"]: row["errors"][number] for row in figures["layers"]} == errors
    assert figures["change"]["answer"]["ratio"] < 0.8 < 1.2 < figures["change"]["vision"]["ratio"]
    assert figures["differences"] == []


def test_a_checkpoint_that_saw_no_data(checkpoints, capfd):
    """Shows the error of the weights and how to get the rest; it can't be compared with one that saw data."""
    rounded, off, _ = checkpoints
    assert cli.main(["report", "--errors", str(rounded)]) == 0
    output = capfd.readouterr().out
    assert "as no calibration data were seen" in output and output.count("quantize with --calib FOLDER") == 1
    for pair in ((rounded, off), (off, rounded)):
        assert cli.main(["report", "--errors", *map(str, pair)]) == 2
        assert "rounded has errors of weights only" in capfd.readouterr().err


def test_different_measurements_are_distinguished(tmp_path, capfd):
    calibration = {"source": "d", "sha256": "1", "samples": 3, "prefix": "float"}
    before = made(tmp_path / "before", {A: {"text": 0.01}, B: {"text": 0.02}}, warnings=["something was damped"])
    after = made(tmp_path / "after", {A: {"text": 0.02}}, calibration=calibration)
    assert cli.main(["report", "--errors", str(before), str(after)]) == 0
    output = capfd.readouterr().out
    for part in ("not compared: 1", "different calibration samples", "after unquantized ones", "damped"):
        assert part in output


def test_nothing_in_common(tmp_path):
    first, other = (
        layers.read_errors(made(tmp_path / name, {layer: {"text": 0.1}})) for name, layer in (("a", A), ("b", B))
    )
    with pytest.raises(UserError, match="no quantized layer in common"):
        layers.compare_errors(first, other)


def test_a_kind_is_compared_over_the_layers_that_have_it_in_both() -> None:
    """An expert that got no visual tokens of some data has no error of that kind; one that got no tokens at all has none."""
    first = LayerErrors("a", {A: {"text": 0.01, "vision": 0.04}, B: {"text": 0.02, "vision": 0.02, "answer": 0.03}})
    other = LayerErrors("b", {A: {"text": 0.01, "answer": 0.01}, B: {"text": 0.01, "vision": 0.01}, "idle": {}})
    changes = layers.compare_errors(first, other)
    assert changes["vision"] == {"before": 0.02, "after": 0.01, "ratio": pytest.approx(0.5), "better": 1, "worse": 0}
    assert list(changes) == ["text", "vision"]
    rows = [line.split() for line in layers.errors_text(first, other).splitlines()]
    assert next(row for row in rows if row[0] == "better,")[-1] == "-"
    assert next(row for row in rows if row[0] == "idle")[1:] == ["-", "->", "-"] * 3


def test_errors_of_zero_have_no_factor() -> None:
    """A layer that was exact before, and one that only one checkpoint has, are without a ratio."""
    first = LayerErrors("a", {"exact": {"text": 0.0}, "same": {"text": 0.02}, "gone": {"text": 0.01}})
    other = LayerErrors("b", {"exact": {"text": 0.01}, "same": {"text": 0.01}})
    lines = layers.errors_text(first, other).splitlines()
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[3:] if line.startswith("  ")}
    assert rows["exact"].endswith("-> 1.00%") and rows["gone"].endswith("-> -")
    assert rows["same"] == "2.00% -> 1.00% (0.50x)" and rows["better,"].endswith("1, 1")

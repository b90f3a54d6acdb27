"""What `check` and `--dry-run` say before a run: the plan, the data to be read, the output, and what the run would refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit import tiny
from tests.kit.command_line import loud  # noqa: F401
from vlmcompress import cli
from vlmcompress.checkpoint.manifest import MANIFEST


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.build("llava", tmp_path_factory.mktemp("cli") / "llava")


@pytest.fixture(scope="module")
def calib(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "calib.jsonl"
    path.write_text('{"question": "2+2?", "answer": "4"}\n' * 3)
    return ["--calib", str(path)]


def test_dry_run_writes_nothing(capfd, model, calib, tmp_path):
    out = tmp_path / "out"
    assert cli.main(["quantize", str(model), "-o", str(out), "--target", "a100", "--dry-run", "--json", *calib]) == 0
    data = json.loads(capfd.readouterr().out)
    assert data["recipe"]["scheme"] == "gptq-plus" and data["origins"]["scheme"] == "target a100"
    assert data["weights_after"] < data["weights_before"] and data["peak_memory_estimate"] > 0
    assert data["samples"] == 3, "the file has no more"
    assert cli.main(["quantize", str(model), "-o", str(out), "--target", "a100", "--dry-run", *calib]) == 0
    text = capfd.readouterr().out
    assert "target a100" in text and "w4a16" in text and "smaller" in text and "  3 samples" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [[], ["--calib", "/no/such/data"], ["--text", "/no/such/text", "--calib", "."]])
def test_dry_run_refuses_as_the_run_does(capfd, model, tmp_path, flags):
    """Data that are needed and not named, or not there: the same line, before any weight is read."""
    command = ["quantize", str(model), "-o", str(tmp_path / "out"), "--scheme", "awq", *flags]
    command += ["--set", "options.group_size=64"]
    said = []
    for form in (["--dry-run"], []):
        assert cli.main([*command, *form]) == 2
        said.append(capfd.readouterr().err)
    assert said[0] == said[1] and said[0].count("\n") == 1
    assert ("does not exist" if flags else "scheme 'awq' needs calibration images; name some with --calib") in said[0]


@pytest.mark.parametrize(
    ("flags", "what"), [(["--kv-cache", "fp8"], "an FP8 KV cache (kv_cache)"), (["--scheme", "awq"], "scheme 'awq'")]
)
def test_what_needs_images_is_named(capfd, model, tmp_path, flags, what):
    """FP8 weights need none; the KV cache's scales do."""
    command = ["quantize", str(model), "-o", str(tmp_path / "out"), "--scheme", "fp8", "--dry-run", *flags]
    command += ["--set", "options.group_size=64"] if "awq" in flags else []
    assert cli.main(command) == 2
    assert f"error: {what} needs calibration images; name some with --calib" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"picture": "a.png"}, "needs a column question"),
        ({"img": "a.png", "question": "q"}, "has no column image, and 'img' is not read"),
        ({"image": "gone.png", "question": "q"}, "line 1: image 'gone.png' not found"),
        ({"question": "q"}, "have no answer tokens, which options.balance weighs"),
    ],
)
def test_data_are_looked_at_before_a_run(capfd, model, tmp_path, row, says):
    """`--dry-run` and `check` say the very line with which the run would end."""
    (tmp_path / "calib.jsonl").write_text(json.dumps(row))
    command = [str(model), "-o", str(tmp_path / "out"), "--scheme", "awq", "--calib", str(tmp_path / "calib.jsonl")]
    command += ["--set", "options.group_size=64", "--set", "options.balance={text: 1, vision: 0, answer: 1}"]
    for form in (["quantize"], ["quantize", "--dry-run"], ["check"]):
        assert cli.main([*form, *command]) == 2
        assert says in "".join(capfd.readouterr())


def test_calibration_on_text_alone_is_said(capfd, model, calib, tmp_path):
    """While the run can still be stopped, and in what it leaves."""
    out = tmp_path / "out"
    options = ["--scheme", "awq", "--set", "options.group_size=64", "--set", "options.grid=3"]
    assert cli.main(["quantize", str(model), "-o", str(out), *options, *calib]) == 0
    line = "no sample of calib.jsonl shows an image"
    assert f"note: {line}" in capfd.readouterr().err
    (warning,) = [text for text in json.loads((out / MANIFEST).read_text())["warnings"] if "image" in text]
    assert warning.startswith(line)


def test_an_output_is_looked_at_before_a_run(capfd, model, tmp_path):
    command = [str(model), "-o", str(tmp_path), "--scheme", "rtn", "--set", "options.group_size=64"]
    (tmp_path / "somebody's.txt").touch()
    for form, says in [
        (["quantize", "--dry-run"], "exists; choose another folder or pass --overwrite"),
        (["quantize", "--dry-run", "--overwrite"], "is not ours to overwrite"),
        (["check"], "is not ours to overwrite"),
    ]:
        assert cli.main([*form, *command]) == 2
        assert says in "".join(capfd.readouterr())


def test_command_line_wins_over_the_recipe(capfd, model, calib, tmp_path):
    (tmp_path / "r.yaml").write_text("scheme: gptq\nseed: 5\noptions: {group_size: 32}\n")
    arguments = ["quantize", str(model), "--recipe", str(tmp_path / "r.yaml"), "--seed", "0", "--dry-run", "--json"]
    arguments += calib
    for flags in (["--set", "options.group_size=64"], ["--group-size", "64", "--bits", "3"]):
        assert cli.main([*arguments, *flags]) == 0
        recipe = json.loads(capfd.readouterr().out)["recipe"]
        assert (recipe["scheme"], recipe["seed"], recipe["options"]["group_size"]) == ("gptq", 0, 64)
        assert recipe["options"]["bits"] == (3 if "--bits" in flags else 4)

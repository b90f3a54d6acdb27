"""What `check` and `--dry-run` say before a run: the plan, the data to be read, the output, and what the run would refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.kit import tiny
from tests.kit.command_line import loud  # noqa: F401
from tests.kit.pictures import file_of, picture
from vlmcompress import cli
from vlmcompress.export.manifest import MANIFEST

GPTQ = ("--scheme", "gptq", "--group-size", "64", "--calib")


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
    output = []
    for form in (["--dry-run"], []):
        assert cli.main([*command, *form]) == 2
        output.append(capfd.readouterr().err)
    assert output[0] == output[1] and output[0].count("\n") == 1
    assert ("does not exist" if flags else "scheme 'awq' needs calibration images; name some with --calib") in output[0]


@pytest.mark.parametrize(
    ("flags", "what"), [(["--kv-cache", "fp8"], "an FP8 KV cache (kv_cache)"), (["--scheme", "awq"], "scheme 'awq'")]
)
def test_data_without_images_are_refused_where_the_recipe_needs_images(capfd, model, tmp_path, flags, what):
    """FP8 weights need none; the KV cache's scales do."""
    command = ["quantize", str(model), "-o", str(tmp_path / "out"), "--scheme", "fp8", "--dry-run", *flags]
    command += ["--set", "options.group_size=64"] if "awq" in flags else []
    assert cli.main(command) == 2
    assert f"error: {what} needs calibration images; name some with --calib" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"pixels": "a.png"}, "needs a column question"),
        ({"img_a": "a.png", "question": "q"}, "has no column image, and 'img_a' is not read"),
        ({"image": "gone.png", "question": "q"}, "line 1: image 'gone.png' not found"),
        ({"question": "q"}, "have no answer tokens, which options.balance weighs"),
    ],
)
def test_data_are_checked_before_a_run(capfd, model, tmp_path, row, message):
    """`--dry-run` and `check` say the very line with which the run would end."""
    (tmp_path / "calib.jsonl").write_text(json.dumps(row))
    command = [str(model), "-o", str(tmp_path / "out"), "--scheme", "awq", "--calib", str(tmp_path / "calib.jsonl")]
    command += ["--set", "options.group_size=64", "--set", "options.balance={text: 1, vision: 0, answer: 1}"]
    for form in (["quantize"], ["quantize", "--dry-run"], ["check"]):
        assert cli.main([*form, *command]) == 2
        assert message in "".join(capfd.readouterr())


def spoil(folder: Path, kind: str) -> None:
    """Spoil the checkpoint in `folder`, or the picture `a.png` or the rows next to it."""
    template, processor = folder / "model" / "chat_template.jinja", folder / "model" / "processor_config.json"
    if kind == "no template":
        template.unlink()
    elif kind == "text template":
        template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    elif kind == "processor":
        processor.write_text(json.dumps(json.loads(processor.read_text()) | {"num_additional_image_tokens": 0}))
    elif kind == "truncated":
        (folder / "a.png").write_bytes((folder / "a.png").read_bytes()[:200])
    elif kind == "text":
        (folder / "a.png").write_text("not an image")
    elif kind == "long":
        (folder / "calib.jsonl").write_text(json.dumps({"image": "a.png", "question": "x" * 3000, "answer": "b"}))


@pytest.mark.parametrize(
    ("kind", "message", "rows"),
    [
        ("no template", "the model has no chat template; copy chat_template.jinja", False),
        ("text template", "calib.jsonl line 1: the model's chat template shows 0 of 1 images", False),
        (
            "processor",
            "15 placeholder tokens for 16 visual features; in processor_config.json set num_additional",
            False,
        ),
        ("long", "line 1 has 3", False),
        ("truncated", "calib.jsonl line 1: image '", True),
        ("text", "is not an image in one of JPEG, PNG", True),
    ],
)
def test_a_sample_is_encoded_before_a_run(capfd, model, tmp_path, kind, message, rows):
    """`check` reports what the run would; `--dry-run` what can be seen of the rows alone, too."""
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "a.png").write_bytes(file_of(picture(90, 60)))
    (tmp_path / "calib.jsonl").write_text(json.dumps({"image": "a.png", "question": "what?", "answer": "b"}))
    command = [str(tmp_path / "model"), *GPTQ, str(tmp_path / "calib.jsonl")]
    assert cli.main(["check", *command]) == 0
    assert "1 samples of " in (text := capfd.readouterr().out) and "all rows and images were read, 1 encoded" in text
    spoil(tmp_path, kind)
    assert cli.main(["check", *command]) == 2
    assert message in capfd.readouterr().out
    code = cli.main(["quantize", *command, "-o", str(tmp_path / "out"), "--dry-run"])
    printed = capfd.readouterr()
    assert (code, message in printed.err) == ((2, True) if rows else (0, False))
    assert cli.main(["quantize", *command, "-o", str(tmp_path / "out")]) == 2
    assert message in capfd.readouterr().err and not (tmp_path / "out").exists()


def test_columns_and_skipped_rows_are_flags(capfd, model, tmp_path):
    rows = [{"q": "2+2?", "a": "4"}] * 8 + [{"q": ""}]
    (tmp_path / "calib.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["quantize", str(model), *GPTQ, str(tmp_path / "calib.jsonl")]
    command += ["--dry-run", "--json", "-o", str(tmp_path / "out")]
    columns = ["--columns", "question=q", "--columns", "answer=a"]
    assert cli.main([*command, *columns, "--skip-bad", "0.2"]) == 0
    planned = json.loads(capfd.readouterr().out)
    assert planned["samples"] == 8 and planned["recipe"]["calibrate"]["columns"] == {"question": "q", "answer": "a"}
    for flags, message in [
        (columns, "calib.jsonl line 9: question is missing or empty"),
        (["--columns", "question"], "'question' names no column; write FIELD=COLUMN"),
        (["--columns", "questions=q"], "'questions', which is no field; did you mean 'question'?"),
        (["--skip-bad", "some"], "--skip-bad some is not a number of rows"),
    ]:
        assert cli.main([*command, *flags]) == 2
        assert message in capfd.readouterr().err


def test_a_calibration_skips_what_the_model_cannot_take(capfd, tmp_path):
    """One of eleven pictures has a single visual token, for which Mistral 3's code raises; OUT records what was left out."""
    model = tiny.build("mistral3", tmp_path / "model")
    rows = [{"image": f"{number}.png", "question": "what?", "answer": "red"} for number in range(11)]
    for number in range(11):
        (tmp_path / f"{number}.png").write_bytes(file_of(picture(28, 28) if number == 4 else picture(60, 40, number)))
    (tmp_path / "calib.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(model), "--scheme", "gptq", "--group-size", "64", "--calib", str(tmp_path / "calib.jsonl")]
    assert cli.main(["check", *command]) == 0
    assert "10 encoded; skipped: calib.jsonl line 5: the model cannot take its image" in capfd.readouterr().out
    assert cli.main(["quantize", *command, "-o", str(tmp_path / "out")]) == 0
    line = "skipped: calib.jsonl line 5: the model cannot take its image (split_with_sizes"
    printed = capfd.readouterr().err
    assert f"note: {line}" in printed and f"warning: {line}" in printed
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["calibration"]["samples"] == 10 and list(manifest["calibration"]["skipped"]) == [
        "calib.jsonl line 5"
    ]


def test_calibration_on_text_alone_warns(capfd, model, calib, tmp_path):
    """While the run can still be stopped, and in what it leaves."""
    out = tmp_path / "out"
    options = ["--scheme", "awq", "--set", "options.group_size=64", "--set", "options.grid=3"]
    assert cli.main(["quantize", str(model), "-o", str(out), *options, *calib]) == 0
    line = "no sample of calib.jsonl shows an image"
    assert f"note: {line}" in capfd.readouterr().err
    (warning,) = [text for text in json.loads((out / MANIFEST).read_text())["warnings"] if "image" in text]
    assert warning.startswith(line)


def test_an_output_folder_is_checked_before_a_run(capfd, model, tmp_path):
    command = [str(model), "-o", str(tmp_path), "--scheme", "rtn", "--set", "options.group_size=64"]
    (tmp_path / "somebody's.txt").touch()
    for form, message in [
        (["quantize", "--dry-run"], "exists; choose another folder or pass --overwrite"),
        (["quantize", "--dry-run", "--overwrite"], "is not ours to overwrite"),
        (["check"], "is not ours to overwrite"),
    ]:
        assert cli.main([*form, *command]) == 2
        assert message in "".join(capfd.readouterr())


def test_flags_override_the_recipe(capfd, model, calib, tmp_path):
    (tmp_path / "r.yaml").write_text("scheme: gptq\nseed: 5\noptions: {group_size: 32}\n")
    arguments = ["quantize", str(model), "--recipe", str(tmp_path / "r.yaml"), "--seed", "0", "--dry-run", "--json"]
    arguments += calib
    for flags in (["--set", "options.group_size=64"], ["--group-size", "64", "--bits", "3"]):
        assert cli.main([*arguments, *flags]) == 0
        recipe = json.loads(capfd.readouterr().out)["recipe"]
        assert (recipe["scheme"], recipe["seed"], recipe["options"]["group_size"]) == ("gptq", 0, 64)
        assert recipe["options"]["bits"] == (3 if "--bits" in flags else 4)

"""Bad input through the command line: exit code 2, one line that says what and what to do, nothing written, OUT untouched."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.kit import tiny
from vlmcompress import cli

Spoil = Callable[[Path], list[str]]
CASES: dict[str, tuple[Spoil, str]] = {}


def case(message: str) -> Callable[[Spoil], Spoil]:
    """Register what spoils a folder with `model`, `calib.jsonl` and `0.png`; it returns further arguments."""

    def register(spoil: Spoil) -> Spoil:
        CASES[spoil.__name__] = (spoil, message)
        return spoil

    return register


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    tiny.build("llava", folder / "model")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 56, 3), np.uint8)).save(folder / "0.png")
    row = {"id": "0", "image": "0.png", "question": "what is it", "answer": "red"}
    (folder / "calib.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "out").mkdir()
    (folder / "out" / "precious").write_text("keep me")
    return folder


@case("does not exist|no such folder|not a folder")
def missing_model(folder: Path) -> list[str]:
    shutil.rmtree(folder / "model")
    return []


@case("empty|config.json")
def empty_model(folder: Path) -> list[str]:
    shutil.rmtree(folder / "model")
    (folder / "model").mkdir()
    return []


@case("not a vision-language model")
def not_a_vlm(folder: Path) -> list[str]:
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    return []


@case("truncated|shorter|bytes")
def truncated_weights(folder: Path) -> list[str]:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return []


@case("safetensors")
def pickled_weights(folder: Path) -> list[str]:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")
    return []


@case("lm_head|NaN")
def nan_in_weights(folder: Path) -> list[str]:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["language_model.lm_head.weight"][0, 0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    return []


@case("did you mean 'awq'")
def unknown_scheme(folder: Path) -> list[str]:
    return ["--scheme", "awk"]


@case("did you mean 'h100'")
def unknown_target(folder: Path) -> list[str]:
    return ["--target", "h10"]


@case("group_size")
def unknown_key(folder: Path) -> list[str]:
    return ["--set", "options.groupsize=64"]


@case("samples")
def wrong_type(folder: Path) -> list[str]:
    return ["--set", "calibrate.samples=many"]


@case(r"96 does not divide.*model\.language_model\.layers\.0")
def group_that_does_not_divide(folder: Path) -> list[str]:
    return ["--set", "options.group_size=96"]


@case("A100.*int8")
def target_without_the_units(folder: Path) -> list[str]:
    return ["--scheme", "fp8", "--target", "a100"]


@case("nowhere")
def missing_calibration_file(folder: Path) -> list[str]:
    return ["--calib", str(folder / "nowhere.jsonl")]


@case("empty|no rows|no samples")
def empty_calibration_file(folder: Path) -> list[str]:
    (folder / "calib.jsonl").write_text("")
    return []


@case("column|question")
def no_columns(folder: Path) -> list[str]:
    (folder / "calib.jsonl").write_text('{"pixels": "0.png"}\n')
    return []


@case("0.png")
def truncated_image(folder: Path) -> list[str]:
    (folder / "0.png").write_bytes((folder / "0.png").read_bytes()[:200])
    return []


@case("900 Mpx.*shrink it")
def decompression_bomb(folder: Path) -> list[str]:
    Image.new("1", (30_000, 30_000)).save(folder / "0.png")
    return []


@case("tokens")
def longer_than_the_context(folder: Path) -> list[str]:
    row = {"image": "0.png", "question": "word " * 5000, "answer": "red"}
    (folder / "calib.jsonl").write_text(json.dumps(row) + "\n")
    return []


@case("exists")
def output_exists(folder: Path) -> list[str]:
    return ["-o", str(folder / "out")]


@case("cannot write|not a folder")
def output_not_writable(folder: Path) -> list[str]:
    return ["-o", str(folder / "calib.jsonl" / "out")]


@case("calib.jsonl line 1 shows a video, which LlavaProcessor does not take; give images in its place")
def video_for_a_family_without(folder: Path) -> list[str]:
    (folder / "film.mp4").write_bytes(b"never opened")
    row = {"video": "film.mp4", "question": "what happens", "answer": "nothing"}
    (folder / "calib.jsonl").write_text(json.dumps(row) + "\n")
    return []


@case("calib.jsonl line 1 shows a video, and reducers learn and are calibrated from images; drop the row")
def video_for_a_reducer(folder: Path) -> list[str]:
    video_for_a_family_without(folder)
    return ["--reduce", "uniform:0.5"]


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, original, tmp_path, capfd):
    spoil, message = CASES[name]
    folder = tmp_path / "it"
    shutil.copytree(original, folder)
    flags = spoil(folder)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    arguments = ["quantize", str(folder / "model"), "-o", str(folder / "new"), "--scheme", "gptq"]
    code = cli.main([*arguments, "--calib", str(folder / "calib.jsonl"), *flags])
    printed = capfd.readouterr()
    assert code == 2, printed.err
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), printed.err
    assert re.search(message, lines[0]), lines[0]
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


@pytest.mark.parametrize("mode", ["CMYK", "P", "L", "RGBA", "I;16"])
def test_every_kind_of_image_calibrates(mode, original, tmp_path):
    """CMYK, palette, grey, transparent and 16-bit images, one pixel and EXIF-rotated: all usable."""
    folder = tmp_path / "it"
    shutil.copytree(original, folder)
    image = Image.new(mode, (1, 1) if mode == "L" else (40, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "image.tiff", **({"exif": exif} if mode == "RGBA" else {}))
    (folder / "calib.jsonl").write_text(json.dumps({"image": "image.tiff", "question": "q", "answer": "red"}) + "\n")
    arguments = ["quantize", str(folder / "model"), "-o", str(folder / "new"), "--scheme", "gptq"]
    assert cli.main([*arguments, "--calib", str(folder / "calib.jsonl")]) == 0
    assert (folder / "new" / "vlmcompress.json").is_file()

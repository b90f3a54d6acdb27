"""Images and conversations of a benchmark: natural enough, new to every cache, the same for both sides."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmcompress.evaluation.speed.prompts import Prompts, dead_leaves, open_prompts, stamp
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.text import parse_pixels


def spectral_slope(images: list[Image.Image]) -> float:
    """Exponent of the radially averaged power spectrum (Hann window) over frequencies 4 to 64 of square images."""
    n = images[0].width
    window = np.hanning(n)[:, None] * np.hanning(n)
    grey = [np.asarray(image.convert("L"), dtype=float) for image in images]
    power = sum(np.abs(np.fft.fft2((x - x.mean()) * window)) ** 2 for x in grey)
    radius = np.hypot(*np.meshgrid(np.fft.fftfreq(n) * n, np.fft.fftfreq(n) * n))
    rings = np.arange(4, 64)
    mean = [power[(radius >= ring - 0.5) & (radius < ring + 0.5)].mean() for ring in rings]
    return float(np.polyfit(np.log(rings), np.log(mean), 1)[0])


def test_dead_leaves_have_the_spectrum_of_natural_images() -> None:
    """1/f^2, about; noise has a flat one. They also compress: neighbours are alike."""
    images = [dead_leaves((256, 256), seed) for seed in range(8)]
    noise = [Image.fromarray(np.random.default_rng(s).integers(0, 256, (256, 256, 3), np.uint8)) for s in range(8)]
    assert -3.0 < spectral_slope(images) < -1.7
    assert spectral_slope(noise) == pytest.approx(0, abs=0.15)
    assert all(np.asarray(image).std() > 30 for image in images)
    assert dead_leaves((100, 60), 5).size == (100, 60)
    assert (
        dead_leaves((64, 64), 1).tobytes() == dead_leaves((64, 64), 1).tobytes() != dead_leaves((64, 64), 2).tobytes()
    )


def test_stamp_is_unique_and_invisible() -> None:
    image = dead_leaves((48, 32), 0)
    stamped = [stamp(image, serial) for serial in (0, 1, 2, 2**47 + 5)]
    assert len({copy.tobytes() for copy in stamped}) == 4
    for copy in stamped:
        assert np.abs(np.asarray(copy, dtype=int) - np.asarray(image, dtype=int)).max() <= 1
    assert image.tobytes() == dead_leaves((48, 32), 0).tobytes()


def test_sizes() -> None:
    assert parse_pixels("448x336", "--sizes") == (448, 336) and parse_pixels("224", "--sizes") == (224, 224)
    for text in ("448x", "x3", "0x100", "5000", "-3", "big"):
        with pytest.raises(UserError, match=f"--sizes {text} is not a size; .* each from 28 to 4096"):
            parse_pixels(text, "--sizes", 28, 4096)


def addresses(burst: list[list[dict]]) -> list[str]:
    parts = [part for messages in burst for turn in messages for part in turn["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def decode(address: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def test_generated_prompts() -> None:
    prompts = Prompts("generated", (), ((96, 64), (64, 64)))
    first, second = addresses(prompts.burst(0, 5)), addresses(prompts.burst(1, 5))
    assert len({*first, *second}) == 10
    assert [decode(address).size for address in first[:3]] == [(96, 64), (64, 64), (96, 64)]
    assert prompts.burst(1, 5) == Prompts("generated", (), ((96, 64), (64, 64))).burst(1, 5)
    assert addresses(Prompts("generated", (), ((96, 64), (64, 64)), seed=1).burst(0, 5))[0] not in first


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three rows: two with one picture each, one with none."""
    for number in range(2):
        dead_leaves((40, 40), number).save(tmp_path / f"{number}.png")
    rows = [{"image": f"{number}.png", "question": f"what is {number}?", "answer": "x"} for number in range(2)]
    rows.append({"image": None, "question": "only text?", "answer": "x"})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data.jsonl"


def test_few_pictures_never_repeat(data: Path, tmp_path: Path) -> None:
    prompts = open_prompts(data, (), tmp_path, tmp_path, seed=0)
    assert len(prompts.samples) == 2 and prompts.images == 1
    sent = addresses(prompts.burst(0, 7) + prompts.burst(1, 7))
    assert len(set(sent)) == len(sent) == 14
    texts = {part["text"] for turns in prompts.burst(0, 7) for part in turns[0]["content"] if part["type"] == "text"}
    assert texts == {"what is 0?", "what is 1?"}
    scaled = open_prompts(data, [(80, 60)], tmp_path, tmp_path, seed=0)
    assert decode(addresses(scaled.burst(0, 1))[0]).size == (80, 60)


def test_where_prompts_come_from(tmp_path: Path) -> None:
    demo = Path("eval/demo/demo-llava")
    assert open_prompts(None, (), tmp_path, demo, 0).source.endswith("llava/test.parquet")
    assert open_prompts(None, [(64, 64)], tmp_path, demo, 0).source.startswith("generated")
    assert open_prompts(None, (), tmp_path, tmp_path, 0).sizes == ((448, 448),)
    with pytest.raises(UserError, match="does not exist"):
        open_prompts(tmp_path / "nothing", (), tmp_path, tmp_path, 0)
    (tmp_path / "text.jsonl").write_text(json.dumps({"image": None, "question": "why?"}))
    with pytest.raises(UserError, match="no row has an image"):
        open_prompts(tmp_path / "text.jsonl", (), tmp_path, tmp_path, 0)

"""Images and conversations of a benchmark: natural enough, the same for both sides."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmcompress.evaluation.speed.prompts import Prompts, dead_leaves, open_prompts
from vlmcompress.utils.errors import UserError


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


def pictures(prompts: Prompts) -> list[Image.Image]:
    parts = [part for messages in prompts.conversations for turn in messages for part in turn["content"]]
    addresses = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) for address in addresses]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three rows: two with one picture each, one with none."""
    for number in range(2):
        dead_leaves((40, 40), number).save(tmp_path / f"{number}.png")
    rows = [{"image": f"{number}.png", "question": f"what is {number}?", "answer": "x"} for number in range(2)]
    rows.append({"image": None, "question": "only text?", "answer": "x"})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data.jsonl"


def test_each_request_has_its_rows_share(data: Path, tmp_path: Path) -> None:
    """`keep` stays with its question however rows are drawn; data without it set none."""
    assert open_prompts(data, tmp_path, tmp_path, 3, seed=0).keep == ()
    rows = [{"image": f"{number}.png", "question": f"{number}", "keep": number / 4} for number in range(2)]
    (tmp_path / "shares.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = open_prompts(tmp_path / "shares.jsonl", tmp_path, tmp_path, 5, seed=1)
    texts = [turns[0]["content"][-1]["text"] for turns in prompts.conversations]
    assert [float(text) / 4 for text in texts] == list(prompts.keep) and set(texts) == {"0", "1"}


def test_few_rows_are_used_again_with_their_own_questions(data: Path, tmp_path: Path) -> None:
    prompts = open_prompts(data, tmp_path, tmp_path, 7, seed=0)
    assert prompts.images == 1 and len(prompts.conversations) == 7
    texts = [part["text"] for (turn,) in prompts.conversations for part in turn["content"] if part["type"] == "text"]
    assert texts[:2] * 3 + texts[:1] == texts and set(texts) == {"what is 0?", "what is 1?"}
    for text, picture in zip(texts, pictures(prompts), strict=True):
        assert picture.tobytes() == dead_leaves((40, 40), int(text[-2])).tobytes()
    scaled = open_prompts(data, tmp_path, tmp_path, 2, 0, (80, 60))
    assert [picture.size for picture in pictures(scaled)] == [(80, 60)] * 2


def test_where_prompts_come_from(tmp_path: Path) -> None:
    demo = Path("eval/demo/demo-llava")
    assert open_prompts(None, tmp_path, demo, 1, 0).source.endswith("llava/test.parquet")
    generated = open_prompts(None, tmp_path, tmp_path, 3, 0)
    assert generated.source.startswith("generated")
    assert [picture.size for picture in pictures(generated)] == [(448, 448)] * 3
    assert generated == open_prompts(None, tmp_path, tmp_path, 3, 0)
    assert generated.conversations != open_prompts(None, tmp_path, tmp_path, 3, 1).conversations
    with pytest.raises(UserError, match="does not exist"):
        open_prompts(tmp_path / "nothing", tmp_path, tmp_path, 1, 0)
    (tmp_path / "text.jsonl").write_text(json.dumps({"image": None, "question": "why?"}))
    with pytest.raises(UserError, match="no row has an image"):
        open_prompts(tmp_path / "text.jsonl", tmp_path, tmp_path, 1, 0)

"""Made-up results, for everything that only looks at results."""

from __future__ import annotations

import io
from random import Random

import pytest
from PIL import Image

from vlmcompress.evaluation.accuracy import Checkpoint, Results, Scored, summarise

ENGINE = {"name": "vllm", "version": "0.32.0", "device": "cpu", "device_name": "cpu"}


def make_results(n: int = 240, loss: float = 0.08, gain: float = 0.02) -> Results:
    """Results of `n` questions about n/2 images in four families, `loss` of them lost and `gain` won."""
    rng = Random(5)
    scored = []
    for i in range(n):
        u = rng.random()
        before, after = not gain > u, not gain <= u < gain + loss
        scored.append(
            Scored(
                id=f"q{i}",
                family=("colour", "count", "reading <b>", "text")[i % 4],
                question=f"what is {i} & why?",
                expected=f"red {i}",
                baseline=f"red {i}" if before else "blue <script>",
                candidate=f"Red {i}." if after else "",
                baseline_right=before,
                candidate_right=after,
                image=f"image{i // 8}-{i % 4}",
            )
        )
    sides = [Checkpoint(f"/models/{name}", size, 0, 0, 3.2, 900, ENGINE)
             for name, size in (("demo", 9_000_000), ("demo-awq", 4_100_000))]  # fmt: skip
    data = {"source": "/data/test.parquet", "sha256": "ab" * 32, "samples": n, "seed": 0, "max_tokens": 32}
    return summarise(scored, data, *sides)


def picture(size: tuple[int, int], color: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(buffer, "PNG") if color == "noise" else Image.new(
        "RGB", size, color
    ).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def results() -> Results:
    return make_results()

"""Made-up results, for everything that only looks at results."""

from __future__ import annotations

from random import Random

import pytest

from vlmcompress.evaluation.accuracy import Checkpoint, Results, Scored, summarise

ENGINE = {"name": "vllm", "version": "0.32.0", "device": "cpu", "device_name": "cpu"}


def make_results(n: int = 240, loss: float = 0.08, gain: float = 0.02) -> Results:
    """Results of `n` questions in four families, a share `loss` of them lost and `gain` won."""
    rng = Random(5)
    scored = []
    for i in range(n):
        u = rng.random()
        before, after = not gain > u, not gain <= u < gain + loss
        answers = f"red {i}" if before else "blue <script>", f"Red {i}." if after else ""
        family = ("colour", "count", "reading <b>", "text")[i % 4]
        question = f"what is {i} & why?"
        scored.append(Scored(f"q{i}", family, question, f"red {i}", *answers, before, after, f"image{i}"))
    before = Checkpoint("/models/demo", 9_000_000, 0, 1, 3.2, 900, ENGINE)
    after = Checkpoint("/models/demo-awq", 4_100_000, 2, 0, 3.4, 900, ENGINE)
    data = {"source": "/data/test.parquet", "sha256": "ab" * 32, "samples": n, "seed": 0, "max_tokens": 32}
    return summarise(scored, data, before, after)


@pytest.fixture
def results() -> Results:
    return make_results()

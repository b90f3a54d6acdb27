"""Reduced checkpoints of Qwen-VL, GLM-V and their like in the real vLLM engine answer as transformers with the reducer.

One engine after the other: with a prefix cache that is hit, in chunks that cut images, in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import reduced_cases as cases
from tests.kit.engine import asked
from tests.kit.places import DEMO_QWEN
from tests.kit.reduced_serving import CACHED, CHUNKED, TOKENS, check

pytestmark = pytest.mark.engine
METHODS = [f"{method}:{keep}" for method in ("random", "uniform", "dart", "divprune") for keep in (0.5, 0.25)]


@dataclass
class Case:
    """One engine: source checkpoint, reducer, settings; how often each request is given."""

    source: str
    reducer: str
    settings: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    count: int = 8  # of the demo model's questions about one image
    film: bool = False  # a prompt about a video, too

    @property
    def dtype(self) -> str:
        return self.settings.get("dtype", "float32")


BOTH = CHUNKED | CACHED
# vLLM's CPU kernel of Gated DeltaNets knows no other type, and that build has nothing to copy their states for a cache.
RECURRENT = CHUNKED | {"dtype": "bfloat16", "enable_prefix_caching": False}
CASES = {
    "cached": Case("demo", "coverage:0.5,keep_max=1", CACHED, passes=2),
    "qwen2-vl": Case("qwen2-vl", "pixelprune", BOTH, passes=2),
    "qwen3-vl": Case("qwen3-vl", "dart:0.5,keep_max=1", BOTH, passes=2, film=True),
    "qwen3-5": Case("qwen3-5", "uniform:0.5", RECURRENT, film=True),
}
TALL = {"tall, in BF16": Case("tall", "random:0.5", {"dtype": "bfloat16"})}
MORE = {
    "pixels of the demo": Case("demo", "pixelprune:threshold=0.1", BOTH, passes=2),
    "pixels of paddleocr-vl": Case("paddleocr-vl", "pixelprune", BOTH, passes=2),
    "pixels of qwen3-vl": Case("qwen3-vl", "pixelprune", BOTH, passes=2),
    "qwen2-vl, films too": Case("qwen2-vl", "uniform:0.25", BOTH, passes=2, film=True),
    "in chunks": Case("demo", "dart:0.5", CHUNKED | {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}),
    "qwen2-5-vl": Case("qwen2-5-vl", "dart:0.5", BOTH, passes=2, film=True),
    "qwen2-5-vl by a scorer": Case("demo", "learned:0.25", BOTH, passes=2),
    "qwen3-5-moe": Case("qwen3-5-moe", "uniform:0.5", RECURRENT, film=True),
    "qwen3-vl-moe": Case("qwen3-vl-moe", "dart:0.5", BOTH, passes=2, film=True),
    "glm4v": Case("glm4v", "dart:0.5", BOTH, passes=2),
    "glm4v-moe": Case("glm4v-moe", "dart:0.5", BOTH, passes=2),
    "glm-ocr": Case("glm-ocr", "dart:0.5", BOTH, passes=2),
    "paddleocr-vl": Case("paddleocr-vl", "dart:0.5", BOTH, passes=2),
    "exaone4-5": Case("exaone4-5", "dart:0.5", BOTH, passes=2),
}


def serve(chosen: dict[str, Case], folder: Path) -> dict[str, tuple[dict, list[dict]]]:
    """Of each case what the engine made of it, and what transformers does."""
    pytest.importorskip("vllm")
    jobs, expected, models = [], [], {}
    for name, case in chosen.items():
        if case.source not in models:
            models[case.source] = (source := checkpoint(case.source, folder)), cases.loaded(source)
        source, vlm = models[case.source]
        turns = prompts(case)
        requests = [cases.request(vlm, each, folder / name / "images") for each in turns]
        reducer = cases.trained(case.reducer, vlm, folder / name)
        films = [cases.film(vlm, folder / name / "video")] if case.film else []
        requests, films = (cases.with_keeps(reducer, asked_of) for asked_of in (requests, films))
        answers = cases.reference(vlm, reducer, requests, TOKENS)
        answers += [cases.film_reference(vlm, reducer, film, TOKENS) for film in films]
        reduced = cases.reduced(source, folder / name / "model", reducer)
        jobs.append(
            {
                "folder": str(reduced),
                "settings": case.settings,
                "passes": case.passes,
                "max_tokens": TOKENS,
                "requests": requests + films,
            }
        )
        expected.append(answers)
    return dict(zip(chosen, zip(asked("reduced", jobs), expected, strict=True), strict=True))


def checkpoint(name: str, folder: Path) -> Path:
    """The demo model, a family's tiny one, or one that takes images of which a side has over 256 tokens."""
    if name == "demo":
        return DEMO_QWEN
    if name == "tall":
        return cases.tiny("qwen2-5-vl", folder / name, longest_edge=28 * 28 * 800)
    return cases.tiny(name, folder / name)


def prompts(case: Case) -> list[cases.Turns]:
    """The requests of a case."""
    if case.source == "demo":
        return cases.questions(case.count)
    if case.source == "tall":
        return [[cases.turn(cases.noise(0, 56, 28 * 383), "what?")]]
    return cases.noisy(flat=case.reducer.startswith("pixelprune"))


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[str, tuple[dict, list[dict]]]:
    return serve(CASES | TALL, tmp_path_factory.mktemp("reduced"))


@pytest.mark.parametrize("name", CASES)
def test_answers_and_positions_are_those_of_transformers(name, served):
    """Oracle: transformers in float32 with the same reducer attached; of a video with recurrent states, transformers on the
    shorter sequence."""
    check(*served[name], CASES[name].dtype)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.passes > 1])
def test_repeated_requests_hit_the_prefix_cache(name, served):
    first, second = served[name][0]["passes"]
    assert sum(answer["cached"] for answer in second) > sum(answer["cached"] for answer in first)


def test_positions_beyond_256_are_exact_in_bf16(served):
    """Oracle: transformers in float32. BF16 has 8 significant bits: 257 would become 256."""
    answers, (expected,) = served["tall, in BF16"]
    (answer,) = answers["passes"][0]
    count = len(answer["positions"])  # answers differ in BF16, and one may end before the other
    assert answer["positions"] == expected["positions"][:count]
    assert count > expected["prompt"]
    assert 257 in torch.tensor(expected["positions"])


@pytest.mark.slow
def test_more_families_and_methods_answer_like_transformers(tmp_path):
    """Oracle: transformers in float32 with the same reducer attached."""
    for name, (answers, expected) in serve(MORE, tmp_path).items():
        check(answers, expected, MORE[name].dtype)


@pytest.mark.slow
def test_two_hundred_questions_with_every_method_of_projected_tokens(tmp_path):
    """Oracle: transformers in float32 with the same reducer attached."""
    chosen = {reducer: Case("demo", reducer, count=130) for reducer in METHODS}
    for answers, expected in serve(chosen, tmp_path).values():
        assert len(expected) > 200
        check(answers, expected)

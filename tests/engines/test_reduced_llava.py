"""Reduced checkpoints of families with plain RoPE in the real vLLM engine answer as transformers does with the reducer.

One engine after the other: with a prefix cache that is hit, and in chunks that cut images.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit import reduced_cases as cases
from tests.kit.engine import asked
from tests.kit.places import DEMO_LLAVA
from tests.kit.reduced_serving import CACHED, CHUNKED, TOKENS, check

pytestmark = pytest.mark.engine
ALONE = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
# Source, reducer, settings, passes.
CASES = {
    "cached": ("demo", "visionzip:0.5,keep_max=1", CACHED, 2),
    "in chunks": ("demo", "dart:0.25", CHUNKED | ALONE, 1),
    "llava-next": ("llava-next", "divprune:0.5,keep_max=1", CHUNKED | CACHED, 2),
    "by a scorer": ("demo", "learned:0.25,merge=nearest", CHUNKED | CACHED, 2),
    "internvl": ("internvl", "uniform:0.5,keep_max=1", CHUNKED | CACHED, 2),
}
MORE = {
    "idefics3": ("idefics3", "dart:0.5", CHUNKED | CACHED, 2),
    "llava-onevision": ("llava-onevision", "random:0.25", CHUNKED | CACHED, 2),
    "internvl, images too": ("internvl", "dart:0.5", CHUNKED | CACHED, 2),
    "pixels": ("demo", "pixelprune:threshold=0.1", CHUNKED | CACHED, 2),
    "pixels of internvl": ("internvl", "pixelprune", CHUNKED | CACHED, 2),
    "pixels of idefics3": ("idefics3", "pixelprune", CHUNKED | CACHED, 2),
    "merged": ("demo", "coverage:0.25,merge=nearest", CHUNKED | CACHED, 2),
    "attention in two layers": ("demo", "vscan:0.25,shallow=1", CHUNKED | CACHED, 2),
    "pooled": ("llava-next", "pool:window=2x3", CHUNKED | CACHED, 2),
    "smolvlm": ("smolvlm", "uniform:0.5", CHUNKED | CACHED, 2),
}
FILMED = (
    "internvl",
    "internvl, images too",
    "llava-onevision",
    "llava-onevision, videos only",
)
METHODS = (
    "random:0.25",
    "uniform:0.5",
    "dart:0.25",
    "divprune:0.5",
    "visionzip:0.5",
    "vscan:0.25,shallow=1",
)


def serve(chosen: dict, folder: Path, count: int = 8) -> dict[str, tuple[dict, list[dict]]]:
    """Of each case what the engine made of it, and what transformers does. `count`: of the demo's questions about one image."""
    jobs, expected, models = [], [], {}
    for name, (source, reducer, settings, passes) in chosen.items():
        if source not in models:
            path = DEMO_LLAVA if source == "demo" else cases.tiny(source, folder / source)
            models[source] = path, cases.loaded(path)
        path, vlm = models[source]
        turns = (
            cases.questions(count, "llava") if source == "demo" else cases.noisy(flat=reducer.startswith("pixelprune"))
        )
        requests = [cases.request(vlm, each, folder / name / "images") for each in turns]
        reducer = cases.trained(reducer, vlm, folder / name)
        films = [cases.film(vlm, folder / name / "videos", frames) for frames in (6, 3) if name in FILMED]
        requests, films = (cases.with_keeps(reducer, asked_of) for asked_of in (requests, films))
        answers = cases.reference(vlm, reducer, requests, TOKENS)
        answers += [cases.film_reference(vlm, reducer, film, TOKENS) for film in films]
        reduced = cases.reduced(path, folder / name / "model", reducer)
        jobs.append(
            {
                "folder": str(reduced),
                "settings": settings,
                "passes": passes,
                "max_tokens": TOKENS,
                "requests": requests + films,
            }
        )
        expected.append(answers)
    return dict(zip(chosen, zip(asked("reduced", jobs), expected, strict=True), strict=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[str, tuple[dict, list[dict]]]:
    return serve(CASES, tmp_path_factory.mktemp("reduced"))


@pytest.mark.parametrize("name", CASES)
def test_answers_and_positions_are_those_of_transformers(name, served):
    """Oracle: transformers in float32 with the same reducer attached."""
    check(*served[name])


@pytest.mark.parametrize("name", [name for name, (*_, passes) in CASES.items() if passes > 1])
def test_repeated_requests_hit_the_prefix_cache(name, served):
    first, second = served[name][0]["passes"]
    assert cached(second) > cached(first)


def cached(answers: Sequence[dict]) -> int:
    """Tokens that came from the prefix cache."""
    return sum(answer["cached"] for answer in answers)


@pytest.mark.slow
def test_other_families_and_settings_answer_like_transformers(tmp_path):
    """Oracle: transformers in float32 with the same reducer attached."""
    chosen = {name: case for name, case in MORE.items() if name != "smolvlm" or importlib.util.find_spec("num2words")}
    for served, expected in serve(chosen, tmp_path).values():
        check(served, expected)


@pytest.mark.slow
def test_two_hundred_questions_with_every_method(tmp_path):
    """Oracle: transformers in float32 with the same reducer attached."""
    for served, expected in serve({name: ("demo", name, CACHED, 1) for name in METHODS}, tmp_path, count=130).values():
        assert len(expected) > 200
        check(served, expected)

"""Reduced checkpoints that choose among a request's images, in the real vLLM engine: answers, positions and work saved.

Each engine is asked the same images under several questions, so that an image stays in one request and is left out in the
next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit import reduced_cases as cases
from tests.kit.engine import asked
from tests.kit.places import DEMO_LLAVA
from tests.kit.reduced_cases import noise, turn
from tests.kit.reduced_serving import CACHED, CHUNKED, TOKENS, check
from vlmcompress.models import VLM

pytestmark = pytest.mark.engine
ALONE = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
ROOM = {"limit_mm_per_prompt": {"image": 3}}
# Source, reducer, settings, passes.
CASES = {
    "llava, cached": ("demo", "litevlm:0.4", CACHED | ROOM, 2),
    "llava, in chunks, uncached": ("demo", "litevlm:0.4", CHUNKED | ALONE | ROOM, 1),
    "qwen3-vl": ("qwen3-vl", "litevlm:0.4", CACHED | ROOM, 2),
    "qwen2-5-vl": ("qwen2-5-vl", "litevlm:0.4", CHUNKED | CACHED | ROOM, 2),
}
MORE = {
    "llava, two of three": ("demo", "litevlm:0.7", CACHED | ROOM, 1),
    "qwen2-vl": ("qwen2-vl", "litevlm:0.4", CHUNKED | CACHED | ROOM, 2),
    "qwen3-vl, uncached": ("qwen3-vl", "litevlm:0.4", CHUNKED | ALONE | ROOM, 1),
    "qwen2-5-vl, two of three": ("qwen2-5-vl", "litevlm:0.7", CACHED | ROOM, 2),
}
FRONT, LEFT, REAR = noise(0, 84, 84), noise(1, 140, 84), noise(2, 84, 112)


def named(question: str, **images: Any) -> list[dict[str, Any]]:
    """A turn with a name before each image, one a line."""
    parts = [
        part for number, (name, image) in enumerate(images.items()) for part in ("\n" * (number > 0) + name, image)
    ]
    return [turn(*parts, question)]


def questions() -> list[tuple[list[dict[str, Any]], list[bool]]]:
    """Turns, and which images stay at a share of 0.4 where names in the question count most."""
    three = {"front": FRONT, "left": LEFT, "rear": REAR}
    return [
        (named("who is at the rear?", **three), [False, False, True]),
        (named("who is at the front?", **three), [True, False, False]),
        (named("who is to the left?", **three), [False, True, False]),
        (named("is the rear empty?", front=FRONT, rear=REAR), [False, True]),
        (named("is the front empty?", front=FRONT, rear=REAR), [True, False]),
        (named("one or two of the front?", front=FRONT, rear=FRONT), [True, False]),
        ([turn(FRONT, "what is it?")], [True]),
        ([turn("hello there")], []),
        ([turn(LEFT, REAR, "are they the same?")], [True, False]),
    ]


def request(vlm: VLM, turns: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """The prompt's text and files of its images, each where it stands: LLaVA's template puts all images before the text."""
    vllm_request = cases.request(vlm, turns, folder)
    if vlm.spec.family == "llava":
        parts = [part["text"] if part["type"] == "text" else "<image>" for part in turns[0]["content"]]
        vllm_request["prompt"] = f"USER: {''.join(parts)} ASSISTANT:"
    return vllm_request


def served(chosen: dict, folder: Path) -> dict[str, tuple[dict, list[dict], list[int]]]:
    """Of each case what the engine made of it, what transformers does, and how many numbers of pixels are to be encoded."""
    jobs, expected, models = [], [], {}
    for name, (source, reducer, settings, passes) in chosen.items():
        if source not in models:
            path = DEMO_LLAVA if source == "demo" else cases.tiny(source, folder / source)
            models[source] = path, cases.loaded(path)
        path, vlm = models[source]
        requests = [request(vlm, each, folder / name / "images") for each, _ in questions()]
        reduced = cases.reduced(path, folder / name / "model", reducer)
        jobs.append(
            {
                "folder": str(reduced),
                "settings": settings,
                "passes": passes,
                "max_tokens": TOKENS,
                "requests": requests,
            }
        )
        answers = cases.reference(vlm, reducer, requests, TOKENS)
        expected.append((answers, [pixels(vlm, turns, stays) for turns, stays in questions()]))
    return {
        name: (engine_answers, *expectations)
        for name, engine_answers, expectations in zip(chosen, asked("reduced", jobs), expected, strict=True)
    }


def pixels(vlm: VLM, turns: list[dict[str, Any]], stays: Sequence[bool]) -> int:
    """How many numbers the images that stay have after the image processor."""
    images = [part["image"] for part in turns[0]["content"] if part["type"] == "image"]
    kept = [image for image, stay in zip(images, stays, strict=True) if stay]
    return sum(
        vlm.processor.image_processor(images=[image], return_tensors="pt")["pixel_values"].numel() for image in kept
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, tuple[dict, list[dict], list[int]]]:
    return served(CASES, tmp_path_factory.mktemp("views"))


@pytest.mark.parametrize("name", CASES)
def test_answers_and_positions_are_those_of_transformers(name, results):
    """Oracle: transformers in float32 with the same reducer attached."""
    check(*results[name][:2])


def test_the_tower_runs_on_the_images_that_stay_alone(results):
    answers, _, expected = results["llava, in chunks, uncached"]
    assert [answer["encoded"] for answer in answers["passes"][0]] == expected
    assert sum(expected) > 0


@pytest.mark.parametrize("name", ["llava, cached", "qwen3-vl"])
def test_an_image_that_stays_is_encoded_once_for_all_questions(name, results):
    """The three images stay first in the first three requests; later and in the second pass none is encoded.

    In steps of few tokens vLLM's encoder cache holds too few images for that.
    """
    answers, _, expected = results[name]
    first, second = ([answer["encoded"] for answer in each] for each in answers["passes"])
    new = [True, True, True, False, False, False, False, False, False]
    assert first == [count if fresh else 0 for count, fresh in zip(expected, new, strict=True)]
    assert not any(second)


@pytest.mark.slow
def test_other_families_and_settings(tmp_path):
    """Oracle: transformers in float32 with the same reducer attached."""
    for answers, expected, _ in served(MORE, tmp_path).values():
        check(answers, expected)

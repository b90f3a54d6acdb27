"""Counts by the image in the real vLLM engine: as many tokens as its pixels say, and answers are those of transformers.

One engine for each method, with a prefix cache that is hit and with chunks that cut images.
"""

from __future__ import annotations

import dataclasses

import pytest
from PIL import Image
from transformers import AutoConfig

from tests.kit import reduced_cases as cases
from tests.kit.engine import asked
from tests.kit.places import DEMO_LLAVA
from tests.kit.reduced_serving import CACHED, CHUNKED, TOKENS, check
from vlmcompress.models.data import bundled_data, encode, load_samples
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import learning as thresholds
from vlmcompress.utils.errors import UserError


def prompts() -> list[cases.Turns]:
    """Questions about one image and two, without one, about a blank image, and about it and noise."""
    blank = Image.new("RGB", (144, 144), (90, 90, 90))
    noise = cases.noise(0, 144, 144)
    return [*cases.questions(8, "llava"), [cases.turn(blank, "what is this?")], [cases.turn(noise, blank, "and?")]]


@pytest.mark.engine
def test_counts_and_answers_are_those_of_transformers(tmp_path):
    pytest.importorskip("vllm")
    vlm = cases.loaded(DEMO_LLAVA)
    batches = encode(load_samples(bundled_data(DEMO_LLAVA, "calibration"), samples=32, seed=0), vlm)
    reducer = thresholds.learn_thresholds(vlm, batches, parse_reducer("dymu:0.4"))
    counter = thresholds.counter(vlm, batches, reducer)
    requests = [cases.request(vlm, turns, tmp_path / "images") for turns in prompts()]
    expected = cases.reference(vlm, reducer, requests, TOKENS, counter)
    files = [Image.open(file) for request in requests for file in request["images"]]
    pixels = vlm.processor.image_processor(files, return_tensors="pt")["pixel_values"]
    assert len({counter.count(image) for image in pixels}) > 3
    folder = cases.reduced(DEMO_LLAVA, tmp_path / "model", reducer, counter)
    job = {"folder": str(folder), "settings": CHUNKED | CACHED, "passes": 2, "max_tokens": TOKENS, "requests": requests}
    (served,) = asked("reduced", [job])
    check(served, expected)
    assert any(answer["cached"] for answer in served["passes"][1])


@pytest.mark.engine
def test_every_tile_has_its_own_count(tmp_path):
    """InternVL and Idefics3, whose tokens are blocks of patches: the prompt has as many of each tile as its pixels say."""
    pytest.importorskip("vllm")
    jobs, references = [], []
    for family in ("internvl", "idefics3"):
        source = cases.tiny(family, tmp_path / family)
        vlm = cases.loaded(source)
        requests = [cases.request(vlm, turns, tmp_path / "images") for turns in cases.noisy(flat=True)]
        batches = [inputs_of(vlm, request) for request in requests if request["images"]]
        reducer = thresholds.learn_thresholds(vlm, batches, parse_reducer("dymu:0.6"))
        counter = thresholds.counter(vlm, batches, reducer)
        steep = dataclasses.replace(counter, margin=0.0, weights=tuple(20 * weight for weight in counter.weights))
        tiles = [tile for inputs in batches for tile in thresholds.pictures(inputs)]
        assert len({steep.count(tile) for tile in tiles}) > 2
        references.append(cases.reference(vlm, reducer, requests, TOKENS, steep))
        folder = cases.reduced(source, tmp_path / f"{family}-model", reducer, steep)
        settings = CHUNKED | CACHED
        jobs.append(
            {"folder": str(folder), "settings": settings, "passes": 2, "max_tokens": TOKENS, "requests": requests}
        )
    for served, expected in zip(asked("reduced", jobs), references, strict=True):
        check(served, expected)
        assert any(answer["cached"] for answer in served["passes"][1])


def inputs_of(vlm, request):
    """What the model's processor makes of a request."""
    images = [Image.open(file) for file in request["images"]]
    return vlm.processor(text=[request["prompt"]], images=images, return_tensors="pt")


def test_without_counts_it_is_refused(tmp_path):
    pytest.importorskip("vllm")
    from vlmcompress.engines.vllm.plugin._served_reducer import ServedReducer

    reducer = parse_reducer("dymu:thresholds=[0.9, 0.9, 0.9, 0.9]")
    config = AutoConfig.from_pretrained(cases.reduced(DEMO_LLAVA, tmp_path / "model", reducer))
    with pytest.raises(UserError, match="'count' is missing"):
        ServedReducer.of(config)

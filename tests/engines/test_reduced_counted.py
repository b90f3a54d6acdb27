"""DyMU in the real vLLM engine: each image has as many tokens as its pixels say, and answers are those of transformers.

One engine with a prefix cache that is hit and with chunks that cut images.
"""

from __future__ import annotations

import pytest
from PIL import Image
from transformers import AutoConfig

from tests.kit import reduced_cases as cases
from tests.kit.engine import asked
from tests.kit.places import DEMO_LLAVA
from tests.kit.reduced_serving import CACHED, CHUNKED, TOKENS, check
from vlmcompress.checkpoint import reducer_block
from vlmcompress.data import bundled, encode, load_samples
from vlmcompress.errors import UserError
from vlmcompress.recipe.reducer import parse
from vlmcompress.reduction import learning as thresholds


def prompts() -> list[cases.Turns]:
    """Questions about one image and two, without one, about a blank image, and about it and noise."""
    blank = Image.new("RGB", (144, 144), (90, 90, 90))
    noise = cases.noise(0, 144, 144)
    return [*cases.questions(8, "llava"), [cases.turn(blank, "what is this?")], [cases.turn(noise, blank, "and?")]]


@pytest.mark.engine
def test_counts_and_answers_are_those_of_transformers(tmp_path):
    pytest.importorskip("vllm")
    vlm = cases.loaded(DEMO_LLAVA)
    batches = encode(load_samples(bundled(DEMO_LLAVA, "calibration"), samples=32, seed=0), vlm)
    reducer = thresholds.learn(vlm, batches, parse("dymu:0.4"))
    counter = thresholds.counter(vlm, batches, reducer)
    requests = [cases.request(vlm, turns, tmp_path / "images") for turns in prompts()]
    expected = cases.reference(vlm, reducer, requests, TOKENS, counter)
    files = [Image.open(file) for one in requests for file in one["images"]]
    pixels = vlm.processor.image_processor(files, return_tensors="pt")["pixel_values"]
    assert len({counter.count(image) for image in pixels}) > 3
    folder = cases.reduced(DEMO_LLAVA, tmp_path / "model", reducer, counter)
    job = {"folder": str(folder), "settings": CHUNKED | CACHED, "passes": 2, "max_tokens": TOKENS, "requests": requests}
    (found,) = asked("reduced", [job])
    check(found, expected)
    assert any(answer["cached"] for answer in found["passes"][1])


def test_without_counts_it_is_refused():
    pytest.importorskip("vllm")
    from vlmcompress.engines.vllm.plugin._reducer import ServedReducer

    config = AutoConfig.from_pretrained(DEMO_LLAVA)
    plain = {"model_type": "llava", "architectures": config.architectures}
    block = reducer_block.write(plain, parse("dymu:thresholds=[0.9, 0.9, 0.9, 0.9]"))
    config.update(block)
    with pytest.raises(UserError, match="'count' is missing"):
        ServedReducer.of(config)

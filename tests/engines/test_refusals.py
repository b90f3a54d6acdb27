"""Requests for which a model or an engine raises: the others are answered all the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.kit.pictures import picture
from tests.kit.tiny import build
from vlmcompress.engines import EngineSettings, Request
from vlmcompress.engines.hf import ENGINE
from vlmcompress.utils.errors import UserError

MODULE = """
PACKAGE = 'json'

def start(job): return None, {'name': 'made up'}

def answers(engine, requests, job):
    for request in requests:
        if request['id'] in ('b', 'd'):
            yield request['id'], ValueError('no ' + request['id'])
        else:
            yield request['id'], {'text': 'yes', 'finish': 'stop', 'prompt_tokens': 3, 'output_tokens': 1}
"""


def test_a_worker_continues_after_a_refusal(tmp_path: Path) -> None:
    """The real worker with an engine that refuses two of five; more than the settings allow end the run."""
    module = tmp_path / "made_up.py"
    module.write_text(MODULE)
    engine, requests = replace(ENGINE, module=module), [Request(name, []) for name in "abcde"]
    run = engine.answer("some/model", requests, media=tmp_path, settings=EngineSettings(refusals=2))
    assert [(name, answer.text, answer.refused) for name, answer in run.answers.items()] == [
        *[("a", "yes", None), ("b", "", "ValueError: no b"), ("c", "yes", None)],
        *[("d", "", "ValueError: no d"), ("e", "yes", None)],
    ]
    with pytest.raises(
        UserError, match=r"^sample 'd' can't be answered by some/model: ValueError: no d; so it is with 1"
    ):
        engine.answer("some/model", requests, media=tmp_path, settings=EngineSettings(refusals=1))
    with pytest.raises(UserError, match=r"^sample 'b' can't be answered by some/model: ValueError: no b$"):
        engine.answer("some/model", requests, media=tmp_path)


DIES = """
import os
PACKAGE = 'json'

def start(job): return job['settings']['max_num_seqs'] or 4, {'name': 'made up'}

def answers(size, requests, job):
    requests = list(requests)
    for at in range(0, len(requests), size):
        batch = requests[at : at + size]
        if any(request['id'] in NAMES for request in batch):
            os._exit(1)
        for request in batch:
            yield request['id'], {'text': 'yes', 'finish': 'stop', 'prompt_tokens': 3, 'output_tokens': 1}
"""


def test_a_request_that_ends_the_engine_is_found(tmp_path: Path) -> None:
    """As vLLM's dies of an exception in a model: the requests of that moment run one at a time, others together."""
    module = tmp_path / "dies.py"
    module.write_text(DIES.replace("NAMES", "('f',)"))
    engine, requests = replace(ENGINE, module=module), [Request(name, []) for name in "abcdefghijkl"]
    run = engine.answer("some/model", requests, media=tmp_path, settings=EngineSettings(refusals=1))
    assert [name for name, answer in run.answers.items() if answer.refused] == ["f"] and len(run.answers) == 12
    assert "the engine died of it: made up" not in str(run) and "exit code 1" in (run.answers["f"].refused or "")
    assert run.engine["restarts"] == 3
    with pytest.raises(
        UserError, match="started again after a first crash; 8 requests had no answer, the first is sample 'e'"
    ):
        engine.answer("some/model", requests, media=tmp_path)
    module.write_text(DIES.replace("NAMES", "'abcdef'"))
    with pytest.raises(UserError, match="the first is sample 'd'"):
        engine.answer("some/model", requests, media=tmp_path, settings=EngineSettings(refusals=9))


def requests_about(folder: Path, *images: Image.Image) -> list[Request]:
    requests = []
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
        address = {"url": (folder / f"{number}.png").as_uri()}
        parts = [{"type": "image_url", "image_url": address}, {"type": "text", "text": f"what is {number}?"}]
        requests.append(Request(f"q{number}", [{"role": "user", "content": parts}], max_tokens=2))
    return requests


def test_transformers_finds_the_request_that_its_model_cannot_take(tmp_path: Path, quick_engines) -> None:
    """One of 11 shows a picture so thin that LFM2-VL's code raises; its batch runs in parts."""
    model = build("lfm2-vl", tmp_path / "model")
    images = [picture(90, 60, seed) for seed in range(11)]
    requests = requests_about(tmp_path, *images[:5], Image.new("RGB", (900, 3)), *images[5:10])
    run = ENGINE.answer(model, requests, media=tmp_path, settings=EngineSettings(refusals=1))
    assert [name for name, answer in run.answers.items() if answer.refused] == ["q5"]
    assert "is invalid for input of size" in (run.answers["q5"].refused or "") and run.engine["restarts"] == 0
    assert len(run.answers) == 11 and all(a.output_tokens for a in run.answers.values() if not a.refused)


def test_placeholders_are_counted_before_transformers_runs(tmp_path: Path, quick_engines) -> None:
    model = build("idefics3", tmp_path / "model")
    file = model / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_seq_len": 3}))
    with pytest.raises(
        UserError, match=r"a test image: .* in processor_config.json set image_seq_len to 4 \(it is 3\)"
    ):
        ENGINE.answer(model, requests_about(tmp_path, picture(90, 60)), media=tmp_path)

"""Rarer requests to reduced checkpoints in the real vLLM engine, whose steps are so small that they cut images."""

from __future__ import annotations

import json

import pytest

from tests.kit import reduced_cases as cases
from tests.kit.engine import asked
from tests.kit.places import DEMO_LLAVA, DEMO_QWEN
from tests.kit.reduced_serving import CHUNKED
from tests.kit.vllm_requests import SCHEMA

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module", params=["llava", "qwen"])
def said(request, tmp_path_factory) -> dict:
    folder, source = tmp_path_factory.mktemp(request.param), {"llava": DEMO_LLAVA, "qwen": DEMO_QWEN}[request.param]
    vlm = cases.loaded(source)
    requests = [cases.request(vlm, turns, folder / "images") for turns in cases.questions(4, request.param)]
    reduced = cases.reduced(source, folder / "model", "dart:0.5")
    (result,) = asked("requests", [{"folder": str(reduced), "settings": CHUNKED, "requests": requests}])
    assert "error" not in result, result["error"]
    return result


def test_answers_follow_a_schema(said) -> None:
    for text in said["texts"]:
        values = json.loads(text)
        assert list(values) == SCHEMA["required"] and isinstance(values["sure"], bool)
        assert values["colour"] in SCHEMA["properties"]["colour"]["enum"]


def test_streamed_pieces_add_up_to_the_answer(said) -> None:
    assert len(said["pieces"]) > 1 and "".join(said["pieces"]) == said["texts"][0]


def test_aborted_requests_leave_nothing(said) -> None:
    assert said["after"] == said["before"]
    assert (said["left"], said["kv_usage"]) == (0, 0)

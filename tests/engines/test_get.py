"""Engines by name, and the first token's distribution."""

from __future__ import annotations

import math

import pytest

from vlmcompress.engines import first_tokens, get_engine
from vlmcompress.utils.errors import UserError


def test_get_returns_the_named_engine() -> None:
    assert (get_engine("vllm").name, get_engine("vllm").local) == ("vllm", True)
    assert (get_engine("hf").name, get_engine("hf").local) == ("hf", True)
    served = get_engine("openai:http://localhost:8000/")
    assert (served.name, served.local) == ("openai:http://localhost:8000/v1", False)
    assert get_engine("openai:https://host/api/v2").name == "openai:https://host/api/v2"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vlm", "unknown engine 'vlm'; did you mean 'vllm'?"),
        ("sglang", "unknown engine 'sglang'; choose from hf, llamacpp, mlx, openai:URL, openvino, vllm"),
        ("openai", "'' is not the address of a server; write openai:http://localhost:8000"),
        ("openai:localhost:8000", "'localhost:8000' is not the address of a server; "),
    ],
)
def test_get_refuses_unknown_engines(spec: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        get_engine(spec)
    assert str(caught.value).startswith(message)


def test_first_tokens_with_one_text_count_as_one() -> None:
    logprobs = first_tokens([("a", math.log(0.2)), ("b", math.log(0.3)), ("a", math.log(0.25)), ("c", -math.inf)])
    assert list(logprobs) == ["a", "b", "c"]
    assert logprobs["a"] == pytest.approx(math.log(0.45)) and logprobs["c"] == -math.inf
    assert first_tokens([("a", -800.0), ("a", -800.0)])["a"] == pytest.approx(-800 + math.log(2))

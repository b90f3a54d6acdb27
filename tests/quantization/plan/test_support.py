"""The output of `check MODEL` for a model without a recipe."""

from __future__ import annotations

import json
import re

import pytest

from vlmcompress import cli


@pytest.mark.parametrize(
    "name, lines",
    [
        (
            "llava",
            ["decoder, vision tower, output head", "in vLLM and transformers: .*dymu.*fastv", "vLLM .*llama.cpp"],
        ),
        ("gemma4-unified", ["in 16 bits: vision tower", "by no method", "vLLM .*transformers"]),
    ],
)
def test_quantizing_reducing_and_engines_have_a_line_each(name, lines, checkpoint, capfd):
    assert cli.main(["check", str(checkpoint(name)), "--json"]) == 0
    findings = json.loads(capfd.readouterr().out)["findings"]
    assert [finding["name"] for finding in findings] == ["quantize", "reduce", "engines"]
    for finding, pattern in zip(findings, lines, strict=True):
        assert re.search(pattern, finding["detail"]), finding


def test_a_model_without_a_family_names_the_engine_that_has_it(tmp_path, capfd):
    pytest.importorskip("vllm")
    (tmp_path / "config.json").write_text(
        '{"model_type": "molmo2", "architectures": ["Molmo2ForConditionalGeneration"]}'
    )
    assert cli.main(["check", str(tmp_path), "--json"]) == 2
    quantize, reduce, engines = json.loads(capfd.readouterr().out)["findings"]
    assert "not supported" in quantize["detail"] and not reduce["ok"] and engines["detail"].startswith("vLLM (")

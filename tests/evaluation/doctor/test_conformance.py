"""`vlmcompress doctor --engine vllm`: a reduced checkpoint passes every check, and each check sees what it is there for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit import reduced_cases as cases
from tests.kit import rtn
from tests.kit.float_models import edit, floats
from tests.kit.places import DEMOS
from tests.kit.published import for_vllm
from vlmcompress import cli
from vlmcompress.engines import Answer
from vlmcompress.engines.vllm import PYTHON_VARIABLE
from vlmcompress.evaluation.doctor import conformance
from vlmcompress.evaluation.doctor.conformance import AGAIN, EXACT, KNOWN, ROUNDED, Comparison, judge
from vlmcompress.evaluation.doctor.questions import KINDS, make_questions
from vlmcompress.export.convert import convert
from vlmcompress.utils.errors import UserError

engine = pytest.mark.engine


def test_questions_come_from_a_seed(tmp_path):
    """Drawn or given, of four kinds in turn, and the same again."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        requests = make_questions(folder, 8, None, seed=3)
        assert [request.id for request in requests] == [f"{n} ({kind})" for n, kind in enumerate([*KINDS] * 2)]
    pictures = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]
    assert pictures[0] == pictures[1] and len(set(pictures[0].values())) == len(pictures[0]) == 8
    data = DEMOS / "data" / "llava" / "validation.parquet"
    assert [request.images() for request in make_questions(tmp_path, 4, data, seed=0)] == [1, 2, 1, 0]
    with pytest.raises(UserError, match="take at least 4"):
        make_questions(tmp_path, 3, None, 0)


FIRST = {"yes": -0.1, "no": -2.5, "red": -4.0}
EXPECTED = {name: Answer(name, "yes", "stop", 10, 2, first=FIRST) for name in "abcdefgh"}
ANSWERS = EXPECTED | {name + AGAIN: answer for name, answer in EXPECTED.items()}


def failed(answers: dict[str, Answer], limits=EXACT["vllm"]) -> set[str]:
    return {finding.name for finding in judge(EXPECTED, answers, limits) if not finding.ok}


def test_equal_answers_pass() -> None:
    assert failed(ANSWERS) == failed(ANSWERS, ROUNDED[True]) == set()


@pytest.mark.parametrize(
    ("names", "change", "wrong"),
    [
        (["b"], {"prompt_tokens": 9}, {"prompts"}),
        (["b"], {"first": FIRST | {"yes": -0.2}}, {"first tokens", "asked again"}),
        (["b"], {"first": {"no": -0.1, "yes": -2.5}}, {"first tokens", "likeliest", "asked again"}),
        (["b"], {"text": "no"}, {"asked again"}),
        ([*"abc"], {"text": "no"}, {"asked again", "texts"}),
        (["b" + AGAIN], {"first": FIRST | {"yes": -0.2}}, {"asked again"}),
        (["b" + AGAIN], {"text": "no"}, {"asked again"}),
    ],
)
def test_each_check_detects_its_defect(names, change, wrong) -> None:
    assert failed(ANSWERS | {name: replace(ANSWERS[name], **change) for name in names}) == wrong


def test_errors_show_where_an_engine_is_known_to_differ() -> None:
    """Those of LFM2-VL and Gemma 4 in vLLM were 0.05 nats and more in each image: beyond what windows one longer change."""
    for off, wrong in ((0.01, set()), (0.05, {"first tokens"})):
        changed = {name: replace(answer, first=FIRST | {"yes": -0.1 - off}) for name, answer in ANSWERS.items()}
        assert failed(changed, KNOWN) == wrong, off
        assert "first tokens" in failed(changed, EXACT["vllm"])


def test_unfinished_characters_are_no_difference() -> None:
    """vLLM reports none where transformers decodes one to a mark."""
    part = {
        name: replace(answer, first={"\ufffd": -0.1, "no": -2.5}, text="8\ufffd\ufffd")
        for name, answer in EXPECTED.items()
    }
    none = {name: replace(answer, first={"": -0.1, "no": -2.5}, text="8") for name, answer in EXPECTED.items()}
    assert [finding for finding in judge(part, none, EXACT["vllm"]) if not finding.ok] == []


def test_an_answer_that_is_missing_is_named() -> None:
    answers = {name: answer for name, answer in ANSWERS.items() if name != "c"}
    (finding,) = (finding for finding in judge(EXPECTED, answers, EXACT["vllm"]) if finding.name == "answers")
    assert not finding.ok and finding.detail == "7 of 8 questions answered; not c"


def test_other_tokens_kept_are_no_difference_where_types_have_rounding_errors() -> None:
    """Of few questions, and only with a reducer."""
    other: dict[str, Any] = {"first": {"no": -0.1, "yes": -2.5}, "text": "no"}
    for count, limits, fine in ((2, ROUNDED[True], True), (3, ROUNDED[True], False), (1, ROUNDED[False], False)):
        names = [*"abcdefgh"[:count]]
        changed = [*names, *(name + AGAIN for name in names)]
        answers = ANSWERS | {name: replace(ANSWERS[name], **other) for name in changed}
        assert (failed(answers, limits) == set()) is fine, (count, limits)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory) -> Path:
    return cases.reduced(DEMOS / "demo-qwen", tmp_path_factory.mktemp("reduced") / "demo-qwen", "dart:0.5")


@engine
def test_a_reduced_checkpoint_passes(reduced, quick_engines) -> None:
    pytest.importorskip("vllm")
    data = DEMOS / "data" / "qwen" / "validation.parquet"
    findings = conformance.examine(reduced, "vllm", Comparison(prompts=8, data=data))
    assert [finding for finding in findings if not finding.ok] == []
    assert [finding.name for finding in findings] == [
        "names", "answers", "prompts", "first tokens", "likeliest", "texts", "asked again", "real sizes",
        "engine or weights",
    ]  # fmt: skip
    assert findings[2].detail == "10 prompts with equal counts of tokens"


def test_doctor_without_an_engine(tmp_path, monkeypatch, capfd):
    """One line with the remedy, before any model is loaded."""
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    assert cli.main(["doctor", str(DEMOS / "demo-llava"), "--engine", "vllm", "--json"]) == 2
    assert "point it to the Python that has the engine" in json.loads(capfd.readouterr().out)["error"]


@engine
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-5", "qwen3-vl-moe"])
def test_other_decoders_pass(tmp_path, family, quick_engines):
    """Recurrent states, which vLLM's CPU build computes in bfloat16 only; experts after deepstack."""
    folder = cases.reduced(cases.tiny(family, tmp_path / "full"), tmp_path / "reduced", "uniform:0.5")
    findings = conformance.examine(folder, "vllm", Comparison(prompts=4))
    assert [finding for finding in findings if not finding.ok] == []


@engine
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4", "glm4v", "lfm2-vl", "mistral3"])
def test_float_weights_without_a_neutral_one_pass(tmp_path, family, quick_engines):
    """Rows of images per layer, biases of queries and keys, RoPE in a block among convolutions (by the plugin), queries that
    are scaled."""
    findings = conformance.examine(for_vllm(family, floats(family, tmp_path)), "vllm", Comparison(prompts=4))
    assert [finding for finding in findings if not finding.ok] == []


@engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "text", "cause"),
    [
        ("cohere2-vision", {}, "windows of attention reach one token further"),
        ("gemma3", {}, "attention within an image is causal"),
        ("gemma4", {"use_bidirectional_attention": "vision"}, "attention within an image is causal"),
    ],
)
def test_what_vllm_is_known_for_is_no_problem_of_the_checkpoint(tmp_path, family, text, cause, quick_engines):
    edit(floats(family, tmp_path), "config.json", text_config=text)
    findings = conformance.examine(tmp_path, "vllm", Comparison(prompts=4))
    assert [finding for finding in findings if not finding.ok] == []
    (difference,) = (finding for finding in findings if finding.name == "known")
    assert cause in difference.detail and "already with unquantized weights" in difference.detail


@engine
@pytest.mark.slow
def test_a_bias_that_vllm_leaves_out(tmp_path, quick_engines):
    edit(floats("glm4v", tmp_path), "config.json", text_config={"attention_bias": False})  # transformers ignores it
    (finding,) = conformance.examine(tmp_path, "vllm", Comparison(prompts=4))
    assert (
        not finding.ok and "no place for 6 tensors, first 'model.language_model.layers.0.self_attn.k" in finding.detail
    )
    assert "attention_bias in text_config" in finding.detail


@engine
@pytest.mark.slow
def test_a_format_that_transformers_does_not_read(tmp_path, quick_engines):
    """Oracle: the same weights in compressed-tensors, which transformers reads, take the checkpoint's place there."""
    rtn.write(DEMOS / "demo-llava", tmp_path / "ct", rtn.SCHEMES["w4-asymmetric"])
    convert(tmp_path / "ct", tmp_path / "awq", "awq")
    findings = conformance.examine(tmp_path / "awq", "vllm", Comparison(prompts=4))
    assert [finding for finding in findings if not finding.ok] == []

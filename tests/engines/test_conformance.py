"""`vlmcompress doctor --engine vllm`: a reduced checkpoint passes every check, and each check sees what it is there for."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from tests.kit import reduced_cases as cases
from tests.kit import rtn
from tests.kit.places import DEMOS
from vlmcompress import cli
from vlmcompress.engines.vllm import PYTHON_VARIABLE, conformance
from vlmcompress.engines.vllm.conformance_checks import CHECKS, Answers, Pair, _within, same
from vlmcompress.engines.vllm.conformance_plan import KINDS, make_questions
from vlmcompress.export.convert import convert
from vlmcompress.utils.errors import UserError

engine = pytest.mark.engine


def pair(*tokens: int, likely: float = -0.5) -> Pair:
    """An engine that said 1, 2 with log-probability -0.5 each, and found 7 as likely as `likely`."""
    record = {"tokens": [[1, 2]], "best": [[[1, -0.5], [7, likely]], [[2, -0.5], [7, likely]]]}
    return Pair("q", tokens, record)


def test_equal_but_for_ties():
    assert same([pair(1, 2), pair(1, 2)], "float32") == "1 of 1 answers equal"  # by id
    assert same([pair(1, 7, likely=-0.5005)], "float32") == (
        "1 of 1 answers equal, 1 of them but for ties within 0.0005 nats"
    )
    assert "but for ties" in same([pair(7, 2, likely=-0.7)], "bfloat16")
    for tokens, likely, dtype in (((1, 7), -0.51, "float32"), ((7, 2), -0.8, "bfloat16"), ((1, 3), -0.5, "bfloat16")):
        with pytest.raises(UserError, match="1 of 1 answers differ, first 'q', by "):
            same([pair(*tokens, likely=likely)], dtype)
    with pytest.raises(UserError, match="by inf nats"):
        same([pair(1)], "float32")


def test_questions_come_from_a_seed(tmp_path):
    """Drawn or given, of four kinds in turn, and the same again."""
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(make_questions(tmp_path / name, 8, None, True, seed=3))
    assert [question.kind for question in made[0].plain] == [*KINDS] * 2
    pictures = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert pictures[0] == pictures[1] and len(set(pictures[0].values())) == len(pictures[0]) == 10
    data = DEMOS / "data" / "llava" / "validation.parquet"
    questions = make_questions(tmp_path, 4, data, False, seed=0)
    assert sum("image_url" in json.dumps(question.messages) for question in questions.plain) == 3
    with pytest.raises(UserError, match="take at least 4"):
        make_questions(tmp_path, 3, None, False, 0)


def test_an_answer_without_text_streams_as_none():
    """Nothing can come in two pieces; text of some length must."""
    for pieces, whole, fine in (([""], "", True), (["a"], "a", True), (["ab"], "ab", False), (["x"], "", False)):
        rounds = {"stream": {"q": {"pieces": pieces}}, "whole": {"q": {"text": [whole]}}}
        said = SimpleNamespace(
            questions=SimpleNamespace(plain=[SimpleNamespace(id="q")]),
            round=lambda _, name, rounds=rounds: rounds[name],
        )
        if fine:
            assert CHECKS["streaming"](said)
        else:
            with pytest.raises(UserError, match="streamed "):
                CHECKS["streaming"](said)


@pytest.mark.parametrize(("cached", "tokens"), [(0, 3), (2, 3), (2, 1)])
def test_positions_may_begin_behind_a_cached_prefix(cached, tokens):
    """Two of ten visual tokens dropped; the answer may be shorter than transformers', which went on for three tokens."""
    full = SimpleNamespace(prompt=[0] * 10, positions=torch.arange(12).expand(3, -1))
    said = SimpleNamespace(reduced={"q": SimpleNamespace(prompt=[0] * 8)}, unreduced={"q": full})
    places = [0, 1, 2, 3, 6, 7, 8, 9, 10, 11][cached : 7 + tokens]
    record = {"positions": [places] * 3, "cached": cached, "tokens": [[5] * tokens]}
    assert _within(record, said, "q")
    for wrong in (places[1:], places[:-1], [*places[:-1], 13], [places[1], places[0], *places[2:]]):
        assert not _within(record | {"positions": [wrong] * 3}, said, "q")


@pytest.fixture(scope="module")
def answers(tmp_path_factory, quick_engines) -> Answers:
    """What vLLM and transformers say about a reduced demo model."""
    pytest.importorskip("vllm")
    folder = cases.reduced(DEMOS / "demo-qwen", tmp_path_factory.mktemp("reduced") / "demo-qwen", "dart:0.5")
    return conformance.collect(folder, prompts=8, data=DEMOS / "data" / "qwen" / "validation.parquet")


@engine
def test_a_reduced_checkpoint_passes(answers):
    assert [(check.name, check.detail) for check in conformance.judge(answers) if not check.ok] == []


def records(answers: Answers, engine: str, name: str) -> list[dict]:
    """Of all requests of a round."""
    return [record for request, record in answers.engines[engine]["rounds"][name].items() if request]


def rounded(rows: list[list[int]]) -> list[list[int]]:
    return torch.tensor(rows).bfloat16().long().tolist()


def uncached(answers: Answers) -> None:
    for name in ("again", "long again"):
        for record in records(answers, "caches", name):
            record["cached"] = 0


def other_words(record: dict) -> None:
    record["tokens"][0][-1] = 600 if record["tokens"][0][-1] != 600 else 601


SPOILED = {
    "exact count": lambda f: records(f, "plain", "alone")[1]["prompt"].pop(),
    "budgets": lambda f: f.engines["plain"]["about"].update(image_tokens=10),
    "parity": lambda f: other_words(records(f, "plain", "mixed")[2]),
    "agreement": lambda f: [record["tokens"][0].insert(0, 600) for record in records(f, "served", "agree")],
    "positions": lambda f: records(f, "plain", "turn")[1]["positions"][0].__setitem__(-1, 3),
    "far positions": lambda f: [
        record.update(positions=rounded(record["positions"])) for record in records(f, "served", "far")
    ],
    "prefix cache": lambda f: uncached(f),
    "chunked prefill": lambda f: other_words(records(f, "chunks", "cut")[0]),
    "encoder cache": lambda f: records(f, "caches", "warm")[0].update(encoded=1),
    "cache names": lambda f: records(f, "other", "one")[0].update(media=records(f, "served", "agree")[0]["media"]),
    "second turn": lambda f: other_words(records(f, "caches", "repeat")[1]),
    "structured output": lambda f: records(f, "served", "json")[3].update(
        text=['{"colour":"pink","sure":true,"count":1}']
    ),
    "streaming": lambda f: records(f, "served", "stream")[0]["pieces"].pop(0),
    "log-probabilities": lambda f: records(f, "plain", "alone")[0]["best"][0][1].__setitem__(1, -0.1),
    "several answers": lambda f: other_words(records(f, "plain", "sample 1")[0]),
    "abort": lambda f: f.engines["served"]["about"].update(kv_usage=0.01),
    "n-gram speculation": lambda f: other_words(records(f, "ngram", "few")[0]),
}


@engine
@pytest.mark.parametrize("name", CHECKS)
def test_each_check_sees_what_it_is_there_for(answers, name):
    """An answer, a position, a count of its own is made wrong."""
    spoiled = copy.deepcopy(answers)
    SPOILED[name](spoiled)
    (check,) = (check for check in conformance.judge(spoiled) if check.name == name)
    assert not check.ok, check.detail


@engine
def test_other_tokens_kept_are_no_difference_where_types_have_rounding_errors(answers):
    """What is answered from them is left to the rate of agreement; what is answered from the same ones is not."""
    for dtype, positions, ok in (("bfloat16", 1, True), ("bfloat16", 0, False), ("float32", 1, False)):
        spoiled = copy.deepcopy(answers)
        plain = spoiled.engines["plain"]
        plain["about"]["dtype"] = dtype
        name = next(question.id for question in spoiled.questions.plain if spoiled.exact[question.id].kept)
        for each in ("alone", "mixed"):
            record = plain["rounds"][each][name]
            record["tokens"][0][0] = 600
            record["best"][0] = [[600, -1e-9]]
        plain["rounds"]["alone"][name]["positions"][0][-1] += positions
        judged = {check.name: check.ok for check in conformance.judge(spoiled)}
        assert [judged[check] for check in ("parity", "log-probabilities")] == [ok, ok]


@engine
def test_an_engine_without_a_prefix_cache_is_said_to_have_none(answers):
    """vLLM's CPU build with recurrent states: no hit is due; answers must be equal nevertheless."""
    spoiled = copy.deepcopy(answers)
    spoiled.engines["caches"]["about"]["prefix_caching"] = False
    uncached(spoiled)
    said = CHECKS["prefix cache"](spoiled)
    assert said.endswith("keeps no prefix of a decoder with recurrent states, so none was asked for")
    other_words(records(spoiled, "caches", "long again")[0])
    with pytest.raises(UserError, match="1 of 1 answers differ, first 'far'"):
        CHECKS["prefix cache"](spoiled)


@engine
def test_an_engine_that_fails_fails_what_needs_it(answers):
    spoiled = copy.deepcopy(answers)
    spoiled.engines["caches"] = {"error": "ValueError: out of luck"}
    failed = {check.name: check.detail for check in conformance.judge(spoiled) if not check.ok}
    assert failed.keys() == {"prefix cache", "encoder cache", "second turn"}
    assert failed["prefix cache"] == "vLLM failed: ValueError: out of luck"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--engine", "vllm", "--prompts", "2"], "--prompts is 2; take at least 4"),
        (["--engine", "vllm", "--source", "x"], "--source is for examining files; leave out --engine vllm"),
        (["--engine", "sglang"], "--engine: no 'sglang'"),
        (["--prompts", "9"], "--prompts is for asking an engine; add --engine vllm"),
    ],
)
def test_bad_calls_of_doctor(arguments, text, capfd):
    assert cli.main(["doctor", str(DEMOS / "demo-llava"), *arguments]) == 2
    assert text in capfd.readouterr().err


def test_doctor_without_an_engine(tmp_path, monkeypatch, capfd):
    """One line that says what to do, before any model is loaded."""
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    assert cli.main(["doctor", str(DEMOS / "demo-llava"), "--engine", "vllm", "--json"]) == 2
    assert "point it to the Python that has vLLM" in json.loads(capfd.readouterr().out)["error"]


SLOW = {
    "demo-llava": (
        "random:0.5",
        "uniform:0.25",
        "dart:0.5",
        "divprune:0.25",
        "visionzip:0.25",
        "tome:0.5",
        "vscan:0.5,shallow=1",
    ),
    "demo-qwen": ("random:0.5", "uniform:0.25", "dart:0.25", "divprune:0.25"),
}


@engine
@pytest.mark.slow
@pytest.mark.parametrize(("model", "reducer"), [(model, each) for model, reducers in SLOW.items() for each in reducers])
def test_two_hundred_prompts(tmp_path, model, reducer):
    folder = cases.reduced(DEMOS / model, tmp_path / model, reducer)
    data = DEMOS / "data" / model.removeprefix("demo-") / "validation.parquet"
    failed = [check for check in conformance.examine(folder, prompts=200, data=data) if not check.ok]
    assert failed == []


@engine
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-5", "qwen3-vl-moe"])
def test_other_decoders_pass(tmp_path, family):
    """Recurrent states, which vLLM's CPU build computes in bfloat16 only; experts behind deepstack."""
    folder = cases.reduced(cases.tiny(family, tmp_path / "full"), tmp_path / "reduced", "dart:0.5")
    assert [check for check in conformance.examine(folder, prompts=4) if not check.ok] == []


@engine
@pytest.mark.slow
def test_a_format_that_transformers_does_not_read(tmp_path):
    """Oracle: the same weights in compressed-tensors, which transformers reads, take the checkpoint's place there."""
    rtn.write(DEMOS / "demo-llava", tmp_path / "ct", rtn.SCHEMES["w4-asymmetric"])
    convert(tmp_path / "ct", tmp_path / "awq", "awq")
    judged = {check.name: check for check in conformance.judge(conformance.collect(tmp_path / "awq", prompts=4))}
    assert all(judged[name].ok for name in ("exact count", "parity", "agreement")), judged

"""Answers of models that think first: what is taken off, what counts as no answer, and how long answers may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.echo import Echo, checkpoint, question, write_rows
from vlmcompress.engines import Answer
from vlmcompress.evaluation.accuracy.accuracy import EvalOptions, evaluate
from vlmcompress.evaluation.accuracy.gate import GateFile, SuiteRules, judge
from vlmcompress.evaluation.accuracy.thoughts import MARKS, TOKENS, Thoughts, of_models, read_marks
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.text import tables
from vlmcompress.utils.errors import UserError

QWEN = """{% for m in messages %}<|im_start|>{{ m.role }}
{% for part in m.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}{% endif %}"""


@pytest.mark.parametrize("opening, closing", MARKS)
def test_thoughts_are_no_part_of_an_answer(opening: str, closing: str) -> None:
    thoughts = Thoughts()
    assert thoughts.answer(f"{opening} No?\n Perhaps.{closing}\n Yes") == "Yes"
    assert thoughts.answer(f"No? Perhaps.{closing}Yes") == "Yes" and thoughts.ends_without_beginning(f"No{closing}Yes")
    assert thoughts.answer(f"{opening}a{closing} {opening}b{closing} Yes") == "Yes"
    assert thoughts.answer(f"{opening} Yes or no") is None and thoughts.answer(f"a{closing} Yes {opening} no") is None


def test_answers_without_thoughts_stay_as_they_are() -> None:
    assert Thoughts().answer(" I think <b>yes</b> ") == " I think <b>yes</b> "
    assert Thoughts().answer("<think></think><answer><|begin_of_box|>7<|end_of_box|></answer>") == "7"
    assert Thoughts(begun=True).answer("Yes or no, let me") is None
    assert Thoughts(read_marks("<r>,</r>")).answer("<r>No</r>Yes") == "Yes"
    with pytest.raises(UserError, match="--thoughts <r>: write the two marks"):
        read_marks("<r>")


def test_a_template_shows_whether_answers_begin_with_thoughts(tmp_path: Path) -> None:
    plain, thinking, listed = (checkpoint(tmp_path / name) for name in ("plain", "thinking", "listed"))
    (plain / "chat_template.jinja").write_text(QWEN.replace("<think>", "").replace("</think>", ""))
    (thinking / "chat_template.jinja").write_text(QWEN)
    named = [{"name": "default", "template": QWEN.replace("'<think>\n' }}", "'' }}")}]
    (listed / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    thoughts = [(t.begun, t.expected) for t in (of_models(model) for model in (plain, thinking, listed))]
    assert thoughts == [(False, False), (True, True), (False, True)]
    assert of_models(plain, thinking).begun and not of_models("a served model").expected


class CutOff(Echo):
    """Answers end at the last token of their limit."""

    def answer(self, *args, **options):
        run = super().answer(*args, **options)
        for name, answer in run.answers.items():
            run.answers[name] = Answer(name, answer.text, "length", 1, 1)
        return run


@pytest.mark.parametrize("template", ["", QWEN])
def test_both_sides_are_scored_by_what_follows_their_thoughts(tmp_path: Path, template: str) -> None:
    """The candidate's thoughts name the answer and go on for ever in a quarter of the cases; an empty text would be right."""
    model = checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    rows = [{"id": str(n), "question": str(n), "answer": "Yes"} for n in range(40)]
    data = write_rows(tmp_path / "data.jsonl", *rows)
    opening = "" if template else "<think>"

    def candidate(request) -> str:
        number = int(question(request))
        return f"{opening}Yes? It looks so" + ("</think> Yes" if number % 4 else "")

    before = Echo(lambda request: f"{opening}No, or </think>\nYes.")
    options = EvalOptions(CutOff(candidate), before, score="contains")
    results = evaluate(model, model, [data], None, options)
    (suite,) = results.suites
    assert (suite.overall.baseline, suite.overall.candidate) == (1.0, 0.75)
    assert suite.unfinished == (0, 10) and suite.empty == suite.unparsed == (0, 0)
    assert suite.max_tokens == 32 + TOKENS * bool(template) == before.asked[0].max_tokens
    assert {s.baseline for s in results.samples} == {"Yes."} and results.samples[0].candidate == ""
    assert results.samples[0].candidate_finish == "thinking"
    text = tables(Findings(results))
    row = next(line for line in text.splitlines() if "do not end (raise --max-tokens)" in line)
    assert f"thoughts that {suite.max_tokens} tokens" in row and row.split()[-2:] == ["0", "10"]
    rules = judge(results, GateFile(suites={"*": SuiteRules(margin=0.9, unparsed=0.2)})).rules
    assert (rules[-1].verdict, rules[-1].value) == ("fail", "25.0%")


def test_a_server_whose_template_opens_thoughts(tmp_path: Path) -> None:
    """Its template is unknown: some answers close thoughts that none opens, so those that are cut off without do not end."""
    rows = [{"id": str(n), "question": str(n), "answer": "Yes"} for n in range(8)]
    data = write_rows(tmp_path / "data.jsonl", *rows)
    engine = CutOff(lambda request: "Yes? It is" + "</think> Yes" * (int(question(request)) > 3))
    engine.local = False
    (suite,) = evaluate("m", "m", [data], None, EvalOptions(engine, engine, max_tokens=7)).suites
    assert suite.unfinished == (4, 4) and suite.overall.baseline == 0.5 and engine.asked[0].max_tokens == 7

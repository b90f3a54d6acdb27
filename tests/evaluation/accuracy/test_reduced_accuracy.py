"""Tokens before and after a reducer, from the engine's answers to the report's sentence."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.kit.echo import Echo, checkpoint, picture, question, write_rows
from vlmcompress.evaluation.accuracy.accuracy import EvalOptions, evaluate
from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.results import load_results
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse_reducer


class _Counting(Echo):
    """Tells tokens of images, `visual` of each, next to 10 others; None: it can't tell."""

    def __init__(self, visual, reported=True):
        super().__init__(question)
        self.visual, self.reported = visual, reported

    def answer(self, model, requests, *, on_answer, **options):
        run = super().answer(model, requests, on_answer=lambda _: None, **options)
        for request in requests:
            visual = self.visual * request.images()
            counts = {"prompt_tokens": 10 + visual, "visual_tokens": visual if self.reported else None}
            run.answers[request.id] = dataclasses.replace(run.answers[request.id], **counts)
            on_answer(run.answers[request.id])
        return run


Counting: Any = _Counting


@pytest.fixture
def checkpoints(tmp_path):
    """Two checkpoints, of which the second carries a reducer, and questions about one image and none."""
    rows = [
        {"id": str(i), "question": f"{i}?", "answer": f"{i}?", "image": picture(tmp_path, f"{i}.png"), "keep": 0.5}
        for i in range(3)
    ]
    data = write_rows(tmp_path / "data.jsonl", *rows, {"id": "3", "question": "3?", "answer": "3?"})
    full, less = checkpoint(tmp_path / "full"), checkpoint(tmp_path / "less")
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (less / "config.json").write_text(json.dumps(reducer_block.config_with_reducer(config, parse_reducer("dart:0.25"))))
    return full, less, data


def test_tokens_of_both_sides_are_compared(checkpoints, tmp_path):
    full, less, data = checkpoints
    engine = Counting(20)
    results = evaluate(less, full, [None], data, EvalOptions(engine, Counting(80)))
    assert sorted((request.id, request.keep) for request in engine.asked) == [
        ("0", 0.5),
        ("1", 0.5),
        ("2", 0.5),
        ("3", None),
    ]
    (suite,) = results.suites
    assert suite.prompt_tokens == (280, 100) and suite.visual_tokens == (240, 60)
    assert (results.baseline.reducer, results.candidate.reducer) == ("", "dart:0.25")
    assert [(s.baseline_visual, s.candidate_visual) for s in results.samples] == [(80, 20)] * 3 + [(0, 0)]
    output = "Prompts: 70.0 tokens a request before, 25.0 after; 60.0 and 15.0 of them visual, 25.0% of which are left."
    assert words.tokens(suite) == [output] and output in Findings(results).headline
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "results.json").write_text(json.dumps(results.to_dict()))
    assert load_results(tmp_path / "report").suites == results.suites


def test_an_engine_without_counts_of_visual_tokens(checkpoints):
    full, less, data = checkpoints
    (suite,) = evaluate(less, full, [None], data, EvalOptions(Counting(20, reported=False), Counting(80))).suites
    assert suite.visual_tokens is None
    assert words.tokens(suite) == ["Prompts: 70.0 tokens a request before, 25.0 after."]


def test_equal_prompts_are_not_mentioned(checkpoints):
    full, less, data = checkpoints
    (suite,) = evaluate(less, full, [None], data, EvalOptions(Counting(80), Counting(80))).suites
    assert words.tokens(suite) == []

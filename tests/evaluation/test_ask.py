"""Asking a suite: scores, resuming, and the real engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.echo import Echo, checkpoint, picture, question, write_rows
from tests.kit.places import DEMO_LLAVA, ROOT
from tests.kit.processes import wait_until_gone
from vlmcompress.engines import Settings
from vlmcompress.errors import UserError
from vlmcompress.evaluation.ask import SuiteAnswers, ask_suite
from vlmcompress.evaluation.journal import open_journal
from vlmcompress.evaluation.tasks import load_suite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model")
    picture(tmp_path, "a.png"), picture(tmp_path, "b.png", "blue")
    rows = [
        {"id": "one", "image": "a.png", "question": "red", "answer": "Red.", "family": "f"},
        {"id": "two", "image": ["a.png", "b.png"], "question": "blue", "answer": "green"},
        {"id": "none", "image": [], "question": "no image", "answer": "no image"},
        {"id": "again", "image": "a.png", "question": "x <image> y", "answer": "?"},
    ]
    write_rows(tmp_path / "d.jsonl", *rows)
    return tmp_path


def ask(folder: Path, engine: Echo, data: str = "d.jsonl", **options) -> SuiteAnswers:
    model = folder / "model"
    return ask_suite(model, load_suite(folder / data, candidate=model, baseline=model), engine, **options)


def test_scores_and_pairs(folder: Path) -> None:
    engine = Echo(lambda request: f" {question(request)}\n")
    answers = ask(folder, engine)
    assert [s.id for s in answers.samples] == ["one", "two", "none", "again"]
    assert [s.score for s in answers.samples] == [1.0, 0.0, 1.0, 0.0] and all(s.parsed for s in answers.samples)
    assert [s.text for s in answers.samples] == ["red", "blue", "no image", "x  y"]
    assert [s.expected for s in answers.samples] == ["Red.", "green", "no image", "?"]
    assert [s.family for s in answers.samples] == ["f", "other", "other", "other"]
    red, both, none, again = (s.image for s in answers.samples)
    assert red == again and both.split("+")[0] == red and none == "text:none"
    assert [request.images() for request in engine.asked] == [1, 2, 0, 1]
    assert answers.metrics == {"custom": {"exact_match": 0.5}} and answers.engine["name"] == "echo"


def test_fingerprint_is_of_the_questions(folder: Path) -> None:
    first, second = ask(folder, Echo(question)), ask(folder, Echo(lambda _: "else"))
    assert first.sha256 == second.sha256
    picture(folder, "b.png", "green")
    assert ask(folder, Echo(question)).sha256 != first.sha256


def test_only_what_is_missing_is_asked(folder: Path) -> None:
    class Dies(Exception):
        pass

    def die_at_third(request):
        if len(engine.asked) == 3:
            raise Dies
        return question(request)

    engine = Echo(die_at_third)
    with open_journal(folder / "journal.jsonl") as journal, pytest.raises(Dies):
        ask(folder, engine, journal=journal)
    with open_journal(folder / "journal.jsonl") as journal:
        rest = Echo(question)
        answers = ask(folder, rest, journal=journal)
        assert [r.id for r in rest.asked] == ["none", "again"] and answers.resumed == 2
        assert [s.score for s in answers.samples] == [1.0, 0.0, 1.0, 0.0]
        idle = Echo(question)
        whole = ask(folder, idle, journal=journal)
        assert (
            not idle.asked
            and whole.resumed == 4
            and whole.engine == answers.engine
            and whole.samples == answers.samples
        )
        (folder / "model" / "config.json").write_text('{"changed": true}')
        fresh = Echo(question)
        ask(folder, fresh, journal=journal)
        assert len(fresh.asked) == 4


def test_scores_that_cannot_be_paired(folder: Path) -> None:
    (folder / "functions.py").write_text(
        "def score(doc, results): return {'bleu': ('a', 'b')}\ndef mean(x): return 0\n"
    )
    (folder / "t.yaml").write_text(
        "task: t\ncustom_dataset: !function vlmcompress.evaluation.local_data.load\ndataset_kwargs: {name: t}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: question\ndoc_to_target: answer\n"
        "process_results: !function functions.score\ngeneration_kwargs: {until: [], max_gen_toks: 4}\n"
        "metric_list: [{metric: bleu, aggregation: !function functions.mean, higher_is_better: true}]\n"
    )
    model = folder / "model"
    write_rows(folder / "e.jsonl", {"id": "one", "question": "red", "answer": "red"})
    suite = load_suite(folder / "t.yaml", folder / "e.jsonl", candidate=model, baseline=model)
    with pytest.raises(UserError, match="task t: its metric bleu gives .*'one', not a number in 0 to 1"):
        ask_suite(model, suite, Echo(question))


def test_the_first_filter_counts(folder: Path) -> None:
    (folder / "t.yaml").write_text(
        "task: t\ncustom_dataset: !function vlmcompress.evaluation.local_data.load\ndataset_kwargs: {name: t}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: question\ndoc_to_target: answer\n"
        "generation_kwargs: {until: [], max_gen_toks: 4}\n"
        "filter_list:\n  - name: number\n    filter:\n      - {function: regex, regex_pattern: '(\\d+)'}\n"
        "      - {function: take_first}\n  - name: whole\n    filter: [{function: take_first}]\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    rows = [{"id": "one", "question": "it is 7", "answer": "7"}, {"id": "two", "question": "x", "answer": "x"}]
    model = folder / "model"
    data = write_rows(folder / "e.jsonl", *rows)
    answers = ask_suite(model, load_suite(folder / "t.yaml", data, candidate=model, baseline=model), Echo(question))
    assert [sample.score for sample in answers.samples] == [1.0, 0.0] and answers.metrics == {"t": {"exact_match": 0.5}}


@pytest.mark.slow
@pytest.mark.engine
def test_a_killed_run_of_the_real_engine_continues(tmp_path: Path, quick_engines) -> None:
    """`kill -9` in the middle of a run, then the same again: what was answered is not asked again."""
    path = tmp_path / "journal.jsonl"
    code = f"""
import os
from pathlib import Path
Path({str(tmp_path / "process")!r}).write_text(str(os.getpid()))
from vlmcompress.engines.vllm import ENGINE
from vlmcompress.evaluation.ask import ask_suite
from vlmcompress.evaluation.journal import open_journal
from vlmcompress.evaluation.tasks import load_suite
with open_journal(Path({str(path)!r})) as journal:
    suite = load_suite("world", candidate={str(DEMO_LLAVA)!r}, baseline={str(DEMO_LLAVA)!r}, limit=200)
    ask_suite({str(DEMO_LLAVA)!r}, suite, ENGINE, journal=journal)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 20):
            time.sleep(0.02)
        run.kill()
    # a fork did the work, and ends a moment after the program that stands for it
    assert wait_until_gone(int((tmp_path / "process").read_text()))
    from vlmcompress.engines.vllm import ENGINE

    suite = load_suite("world", candidate=DEMO_LLAVA, baseline=DEMO_LLAVA, limit=200)
    with open_journal(path) as journal:
        before = len(journal)
        assert before >= 20
        answers = ask_suite(DEMO_LLAVA, suite, ENGINE, Settings(), journal)
        assert len(journal) == before + len(suite) - answers.resumed + 1  # and the engine's words about itself
    scores = [sample.score for sample in answers.samples]
    assert 20 <= answers.resumed < 200 and answers.engine["name"] == "vllm"
    assert sum(scores) / len(scores) > 0.9 and len(answers.metrics) == 10

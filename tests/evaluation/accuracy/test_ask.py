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
from vlmcompress.engines import EngineSettings, Refusals, Run
from vlmcompress.evaluation.accuracy.accuracy import EvalOptions, evaluate
from vlmcompress.evaluation.accuracy.ask import SuiteAnswers, ask_suite
from vlmcompress.evaluation.accuracy.tasks import load_suite
from vlmcompress.evaluation.report.files import write_report
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.text import tables
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.work_folder import open_journal


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


def test_only_missing_answers_are_generated(folder: Path) -> None:
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


class Refusing(Echo):
    """Says what `question` makes of a request, and refuses those of some ids."""

    def __init__(self, *names: str):
        super().__init__(question)
        self.names = names

    def answer(self, model, requests, *, on_answer, settings, **_) -> Run:
        refusals = Refusals(str(model), settings.refusals)
        run = super().answer(model, [r for r in requests if r.id not in self.names], on_answer=on_answer)
        for name in [request.id for request in requests if request.id in self.names]:
            run.answers[name] = refusals.add(name, "too odd")
            on_answer(run.answers[name])
        return run


@pytest.fixture
def many(folder: Path) -> Path:
    rows = [
        {"id": f"r{number}", "image": "a.png", "question": f"q{number}", "answer": f"q{number}"} for number in range(40)
    ]
    return write_rows(folder / "many.jsonl", *rows)


def test_refused_samples_count_as_wrong_and_are_retried(folder: Path, many: Path) -> None:
    with open_journal(folder / "journal.jsonl") as journal:
        answers = ask(folder, Refusing("r3", "r9"), "many.jsonl", journal=journal)
        assert {s.id for s in answers.samples if not s.score} == {"r3", "r9"} and all(s.parsed for s in answers.samples)
        assert [s.answer.refused for s in answers.samples if s.id == "r3"] == ["too odd"]
        later = Refusing("r9")
        answers = ask(folder, later, "many.jsonl", journal=journal)
        assert [r.id for r in later.asked] == ["r3"] and {s.id for s in answers.samples if not s.score} == {"r9"}
    with pytest.raises(
        UserError, match="sample 'r4' can't be answered by .*: too odd; so it is with 4 others, too many"
    ):
        ask(folder, Refusing(*(f"r{number}" for number in range(5))), "many.jsonl")


def test_a_refusal_of_the_baseline_counts_for_both_sides(folder: Path, many: Path) -> None:
    """Or the candidate would win a question for nothing; one of the candidate alone is its loss. A report names it."""
    other = checkpoint(folder / "other")
    options = EvalOptions(Refusing("r1", "r2"), Refusing("r1", "r3"))
    results = evaluate(other, folder / "model", [many], None, options)
    scores = {s.id: (s.baseline_score, s.candidate_score) for s in results.samples}
    assert (scores["r1"], scores["r2"], scores["r3"], scores["r4"]) == ((0, 0), (1, 0), (0, 0), (1, 1))
    (suite,) = results.suites
    assert suite.refused == (2, 2) and suite.empty == (0, 0) and suite.agreement == 1.0
    text = tables(Findings(results))
    assert "Counted as wrong, as they were not answered: r1 (too odd); r2 (too odd); r3 (too odd)." in text
    write_report(results, folder / "report")
    again = evaluate(other, folder / "report", [many], None, options)
    assert again.suites[0].overall == suite.overall and again.suites[0].refused == (2, 2)


def test_scores_that_cannot_be_paired(folder: Path) -> None:
    (folder / "functions.py").write_text(
        "def score(doc, results): return {'bleu': ('a', 'b')}\ndef mean(x): return 0\n"
    )
    (folder / "t.yaml").write_text(
        "task: t\ncustom_dataset: !function vlmcompress.evaluation.accuracy.local_data.load\ndataset_kwargs: {name: t}\n"
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
        "task: t\ncustom_dataset: !function vlmcompress.evaluation.accuracy.local_data.load\ndataset_kwargs: {name: t}\n"
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
    """`kill -9` in the middle of a run, then the same again: stored answers are not generated again."""
    path = tmp_path / "journal.jsonl"
    code = f"""
import os
from pathlib import Path
Path({str(tmp_path / "process")!r}).write_text(str(os.getpid()))
from vlmcompress.engines.vllm import ENGINE
from vlmcompress.evaluation.accuracy.ask import ask_suite
from vlmcompress.utils.work_folder import open_journal
from vlmcompress.evaluation.accuracy.tasks import load_suite
from vlmcompress.evaluation.report.files import write_report
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.text import tables
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
        answers = ask_suite(DEMO_LLAVA, suite, ENGINE, EngineSettings(), journal)
        assert len(journal) == before + len(suite) - answers.resumed + 1  # and the engine's words about itself
    scores = [sample.score for sample in answers.samples]
    assert 20 <= answers.resumed < 200 and answers.engine["name"] == "vllm"
    assert sum(scores) / len(scores) > 0.9 and len(answers.metrics) == 10

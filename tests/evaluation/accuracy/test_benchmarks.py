"""Every public benchmark from end to end, on made-up rows with the columns that the real data sets have."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as Pillow

from tests.kit.echo import Echo, checkpoint, question, write_rows
from tests.kit.places import DEMO_LLAVA
from vlmcompress.evaluation.accuracy.ask import SuiteAnswers, ask_suite
from vlmcompress.evaluation.accuracy.catalogue import about_task, task_names
from vlmcompress.evaluation.accuracy.tasks import load_suite
from vlmcompress.utils.errors import UserError

TEXT = Value("string")


def image(colour: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    Pillow.new("RGB", (40, 20), colour).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


RED, BLUE = image("red"), image("blue")
CHOICE = {"question_type": "multiple-choice", "options": "['a red car', 'two cats']"}
BENCHMARKS: dict[str, tuple[str, Features, list[dict[str, Any]]]] = {
    "chartqa": (
        "test",
        Features(image=Image(), query=TEXT, label=List(TEXT), human_or_machine=ClassLabel(names=["0", "1"])),
        [
            {"image": RED, "query": "how many?", "label": ["100"], "human_or_machine": 0},
            {"image": RED, "query": "which?", "label": ["Norway"], "human_or_machine": 1},
        ],
    ),
    "docvqa": (
        "validation",
        Features(questionId=TEXT, question=TEXT, question_types=List(TEXT), image=Image(), answers=List(TEXT)),
        [
            {"questionId": "7", "question": "who?", "question_types": ["form"], "image": RED, "answers": ["J. Doe"]},
            {"questionId": "8", "question": "when?", "question_types": ["form"], "image": RED, "answers": ["1999"]},
        ],
    ),
    "textvqa": (
        "validation",
        Features(question_id=Value("int64"), question=TEXT, image=Image(), answers=List(TEXT)),
        [
            {"question_id": 1, "question": "brand?", "image": RED, "answers": ["Acme"] * 2 + ["acme inc"] * 8},
            {"question_id": 2, "question": "time?", "image": BLUE, "answers": ["ten"] * 10},
        ],
    ),
    "mmmu": (
        "validation",
        Features(
            {"id": TEXT, "question": TEXT, "options": TEXT, "answer": TEXT, "question_type": TEXT}
            | {f"image_{n}": Image() for n in range(1, 8)}
        ),
        [
            {"id": "validation_Art_1", "question": "<image 2> or <image 1>?", "answer": "B", **CHOICE}
            | {"image_1": RED, "image_2": BLUE},
            {
                "id": "validation_Basic_Medical_Science_1",
                "question": "How far in <image 1>?",
                "answer": "['2.5', '5/2']",
            }
            | {"options": "[]", "question_type": "open", "image_1": RED},
        ],
    ),
    "mmbench": (
        "dev",
        Features(
            dict.fromkeys(("question", "hint", "answer", "A", "B", "C", "D", "category"), TEXT)
            | {"index": Value("int64"), "image": Image()}
        ),
        [
            {
                "index": 3,
                "question": "what?",
                "hint": "nan",
                "answer": "B",
                "A": "cat",
                "B": "dog",
                "C": "nan",
                "D": None,
            }
            | {"category": "object", "image": RED},
        ],
    ),
    "pope": (
        "test",
        Features(question_id=TEXT, question=TEXT, answer=TEXT, category=TEXT, image=Image()),
        [
            {"question_id": "1", "question": "dog?", "answer": "yes", "category": kind, "image": RED}
            for kind in ("random", "popular", "adversarial")
        ],
    ),
    "refcoco": (
        "val",
        Features(question_id=TEXT, image=Image(), answer=List(TEXT), bbox=List(Value("float32"))),
        [{"question_id": "5", "image": RED, "answer": ["left dog", "brown one"], "bbox": [4.0, 5.0, 20.0, 10.0]}],
    ),
    "vqav2": (
        "validation",
        Features(
            dict.fromkeys(("question", "multiple_choice_answer", "answer_type"), TEXT)
            | {"question_id": Value("int64"), "image": Image()}
            | {"answers": List({"answer": TEXT, "answer_id": Value("int64")})}
        ),
        [
            {
                "question_id": 9,
                "question": "is it?",
                "multiple_choice_answer": "yes",
                "answer_type": "yes/no",
                "image": RED,
            }
            | {
                "answers": [
                    {"answer": "yes" if n < 2 else "no", "answer_confidence": "yes", "answer_id": n} for n in range(10)
                ]
            },
        ],
    ),
    "ocrbench": (
        "test",
        Features(dataset=TEXT, question=TEXT, question_type=TEXT, answer=List(TEXT), image=Image()),
        [
            {
                "dataset": "IIIT5K",
                "question": "what is written?",
                "question_type": "Regular",
                "answer": ["CENTRE"],
                "image": RED,
            },
            {
                "dataset": "HME100k",
                "question": "formula?",
                "question_type": "Formula",
                "answer": ["\\frac { 1 } 2"],
                "image": RED,
            },
        ],
    ),
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local copy of each data set, in the form in which the Hub has it."""
    monkeypatch.setenv("VLMCOMPRESS_DATA", str(tmp_path / "data"))
    for name, (split, features, rows) in BENCHMARKS.items():
        folder = tmp_path / "data" / name / "data"
        folder.mkdir(parents=True)
        full = [{column: row.get(column) for column in features} for row in rows]
        Dataset.from_list(full, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
        Dataset.from_list([{"wrong": "split"}]).to_parquet(folder / "train-00000-of-00001.parquet")
    checkpoint(tmp_path / "model")
    return tmp_path


def ask(data: Path, name: str, says: Callable[[str], str]) -> SuiteAnswers:
    model = data / "model"
    suite = load_suite(name, candidate=model, baseline=model)
    return ask_suite(model, suite, Echo(lambda request: says(question(request))))


RIGHT: dict[str, list[tuple[str, str, float]]] = {  # part of the prompt -> answer, its score
    "chartqa": [("how many?", "95", 1.0), ("which?", "norway", 1.0)],
    "docvqa": [("who?", "J.Doe", 5 / 6), ("when?", " 1999", 1.0)],
    "textvqa": [("brand?", "Acme", 0.6), ("time?", "10", 1.0)],
    "mmmu": [("(B) two cats", "I think (B)", 1.0), ("How far", "The answer is 2.50", 1.0)],
    "mmbench": [("A. cat\nB. dog\nAnswer", "The dog.", 1.0)],
    "pope": [("dog?", "Yes, there is.", 1.0)],
    "refcoco": [("left dog", "(0.1, 0.25, 0.5, 0.75)", 1.0), ("brown one", "[0, 0, 1, 1]", 0.0)],
    "refcoco_1000": [("left dog", "(100, 250), (600, 750)", 1.0), ("brown one", "(100,250,600,750)", 1.0)],
    "refcoco_pixels": [("left dog", "[4, 5, 24, 15]", 1.0), ("brown one", "[24, 15, 4, 5]", 0.0)],
    "vqav2": [("is it?", "Yes.", 0.6)],
    "ocrbench": [("what is written?", "It says Centre.", 1.0), ("formula?", "$\\frac{1}2$", 1.0)],
}


@pytest.mark.parametrize("name", RIGHT)
def test_scores_of_known_answers(data: Path, name: str) -> None:
    def says(prompt: str) -> str:
        return next(answer for part, answer, _ in RIGHT[name] if part in prompt)

    answers = ask(data, name, says)
    scores = [next(score for part, _, score in RIGHT[name] if part in sample.question) for sample in answers.samples]
    assert [sample.score for sample in answers.samples] == pytest.approx(scores)
    assert all(sample.parsed for sample in answers.samples) and len({s.id for s in answers.samples}) == len(
        answers.samples
    )
    (metrics,) = answers.metrics.values()
    assert next(iter(metrics.values())) == pytest.approx(sum(scores) / len(scores)) and metrics["parsed"] == 1.0


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "docvqa"])
def test_empty_answers_are_counted(data: Path, name: str) -> None:
    open_texts = {"chartqa", "textvqa", "vqav2", "ocrbench"}  # there any text is an answer
    answers = ask(data, name, lambda _: " " if name in open_texts else "hm")
    closed = [sample for sample in answers.samples if "How far" not in sample.question]
    assert closed and not any(sample.parsed or sample.score for sample in closed)


def test_families_ids_and_targets(data: Path) -> None:
    by_benchmark = {name: ask(data, name, lambda _: "hm").samples for name in BENCHMARKS}
    assert {name: [s.family for s in samples] for name, samples in by_benchmark.items()} == {
        "chartqa": ["human", "augmented"],
        "docvqa": ["form", "form"],
        "textvqa": ["textvqa", "textvqa"],
        "mmmu": ["Art", "Basic Medical Science"],
        "mmbench": ["object"],
        "pope": ["random", "popular", "adversarial"],
        "refcoco": ["refcoco", "refcoco"],
        "vqav2": ["yes/no"],
        "ocrbench": ["Regular", "Formula"],
    }
    ids = {name: [s.id for s in samples] for name, samples in by_benchmark.items()}
    assert ids["docvqa"] == ["7", "8"] and ids["pope"][0] == "random-1" and ids["refcoco"] == ["0-0", "0-1"]
    assert [s.expected for s in by_benchmark["mmmu"]] == ["B", "2.5 | 5/2"]
    assert by_benchmark["refcoco"][0].expected == "[0.1000, 0.2500, 0.6000, 0.7500]"
    first, second = (sample.image for sample in by_benchmark["mmmu"])
    assert first.split("+")[1] == second and first.split("+")[0] == by_benchmark["textvqa"][1].image


def test_pope_reports_f1(data: Path) -> None:
    answers = ask(data, "pope", lambda _: "Yes")
    assert answers.metrics["pope"] == {"accuracy": 1.0, "parsed": 1.0, "f1": 1.0}


GSM8K = """---
configs:
- config_name: main
  data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]
---
"""


def test_tasks_of_lm_eval_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own GSM8K, with five examples and its first filter; data in the folder by the data set's name are not downloaded."""
    folder = tmp_path / "openai" / "gsm8k"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(GSM8K)
    write_rows(folder / "train.jsonl", *({"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)))
    write_rows(folder / "test.jsonl", *({"question": f"{n} + 2?", "answer": f"#### {n + 2}"} for n in (10, 20)))
    monkeypatch.chdir(tmp_path)
    model = checkpoint(tmp_path / "model")
    suite = load_suite("gsm8k", candidate=model, baseline=model)
    engine = Echo(lambda request: f"I add.\n#### {12 if '10 + 2' in question(request) else 'many'}")
    answers = ask_suite(model, suite, engine)
    assert [(s.score, s.family) for s in answers.samples] == [(1.0, "gsm8k"), (0.0, "gsm8k")]
    assert suite.metric == "exact_match" and len(engine.asked[0].messages) == 11
    with pytest.raises(UserError, match="no suite is called 'chartqq', here or in lm-eval; did you mean 'chartqa'"):
        load_suite("chartqq", candidate=model, baseline=model)


def test_missing_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLMCOMPRESS_DATA", raising=False)
    with pytest.raises(UserError, match=r"no data for chartqa: give --data, or set VLMCOMPRESS_DATA .*HuggingFaceM4"):
        load_suite("chartqa", candidate=tmp_path, baseline=tmp_path)
    with pytest.raises(UserError, match="gone does not exist; put a local copy of pope there"):
        load_suite("pope", tmp_path / "gone", candidate=tmp_path, baseline=tmp_path)
    with pytest.raises(UserError, match="has no .parquet or .jsonl files"):
        load_suite("pope", tmp_path, candidate=tmp_path, baseline=tmp_path)
    Dataset.from_list([{"question": "q"}]).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(UserError, match="has no column category, question_id; it has question"):
        load_suite("pope", tmp_path, candidate=tmp_path, baseline=tmp_path)


def test_all_benchmarks_document_their_score() -> None:
    others = {"world", "photo", "grounding", "pages", "clips"}
    # the world's: ten families, two groups
    assert set(RIGHT) | others < set(task_names()) and len(task_names()) == len(RIGHT) + 16
    assert all(about_task(name).endswith(".") for name in task_names()) and "ANLS" in about_task("docvqa")


@pytest.mark.slow
@pytest.mark.engine
def test_all_benchmarks_in_the_real_engine(data: Path) -> None:
    """One group of all, on the demo model, which was trained on none of it: answers, scored and counted."""
    from vlmcompress.engines.vllm import ENGINE

    tasks = ", ".join(BENCHMARKS)
    (data / "all.yaml").write_text(f"group: all\ntask: [{tasks}]\n")
    suite = load_suite(data / "all.yaml", candidate=DEMO_LLAVA, baseline=DEMO_LLAVA)
    answers = ask_suite(DEMO_LLAVA, suite, ENGINE)
    assert len(answers.samples) == sum(len(rows) for *_, rows in BENCHMARKS.values()) + 1  # two expressions of a region
    assert set(answers.metrics) == set(BENCHMARKS) and suite.metric == "score" and suite.max_tokens == 128
    assert all(sample.answer.prompt_tokens > 1 and 0 <= sample.score <= 1 for sample in answers.samples)

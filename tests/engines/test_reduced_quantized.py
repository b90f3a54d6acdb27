"""Reduced and quantized: every reducer that a family serves, with every kind of weights, loads in vLLM and answers.

Checkpoints are written by the pipeline from tiny random models, calibrated behind the reducer. Oracle: transformers on the
same checkpoint with the reducer attached: the same prompt, and the same probabilities of the first token.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit import calibration_rows, lane, tiny
from vlmcompress import models
from vlmcompress.engines.vllm import PYTHON_VARIABLE, conformance
from vlmcompress.engines.vllm.conformance_plan import make_questions
from vlmcompress.engines.vllm.conformance_reference import Expected, Reference
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import support
from vlmcompress.reduction.choice import parse

pytestmark = pytest.mark.engine
SCHEMES = {"fp8": {}, "int8": {}, "awq": {"group_size": 32}, "gptq": {"group_size": 64}}
ARCHITECTURES = {
    "llava": "LlavaForConditionalGeneration",
    "qwen2-5-vl": "Qwen2_5_VLForConditionalGeneration",
}
REDUCERS = (
    "random:0.5",
    "uniform:0.5",
    "dart:0.5",
    "divprune:0.5",
    "visionzip:0.5",
    "vscan:0.5,shallow=1",
    "tome:0.5",
    "dymu:0.5",
    "relevance:0.5",
    "litevlm:0.5",
)
SERVED = [
    (family, reducer)
    for family, name in ARCHITECTURES.items()
    for reducer in REDUCERS
    if support.engine_refusal(name, parse(reducer)) is None
]
FEW = [
    ("llava", "visionzip:0.5", "fp8"),
    ("qwen2-5-vl", "dart:0.5", "int8"),
]
REST = [(*pair, scheme) for pair, scheme in itertools.product(SERVED, SCHEMES) if (*pair, scheme) not in FEW]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, quick_engines) -> Path:
    """Tiny models of the families, calibration data, and images to ask about."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 6, lambda i: [] if i == 0 else ["1.png", "0.png"] if i == 1 else f"{i}.png")
    for family in ARCHITECTURES:
        tiny.build(family, folder / family)
    (folder / "media").mkdir()
    return folder


def written(world: Path, out: Path, family: str, reducer: str, scheme: str) -> Path:
    """The checkpoint."""
    recipe = {"model": str(world / family), "out": str(out), "scheme": scheme, "reduce": reducer}
    calibrate = {"data": str(world / "calib.jsonl"), "samples": 6}
    quantize(resolve(recipe | {"options": SCHEMES[scheme], "calibrate": calibrate}).recipe)
    assert reducer_block.read(models.read_config(out)).reducer.method == parse(reducer).method
    return out


@dataclass(frozen=True)
class Exam:
    """Checkpoints, what is asked of each, and transformers' answers by the names of checkpoint and question."""

    folders: dict[str, Path]
    questions: list[Any]
    expected: dict[tuple[str, str], Expected]
    media: Path


def ask_transformers(world: Path, folder: Path, combinations: list[tuple[str, str, str]]) -> Exam:
    """Write the checkpoints, and ask transformers."""
    questions, expected = make_questions(world / "media", 4, None, False, seed=0).plain, {}
    folders = {
        " ".join(names): written(world, folder / " ".join(names).replace(":", "-"), *names) for names in combinations
    }
    for name, out in folders.items():
        reference = Reference(out, "auto")
        with reference.reduced(reducer_block.read(models.read_config(out))):
            for question in questions:
                expected[name, question.id] = reference.ask(question.messages, 1)
    return Exam(folders, questions, expected, world / "media")


def answered(exam: Exam) -> tuple[str, dict[str, dict[str, Any]]]:
    """vLLM's version, and what each checkpoint says to each question, one engine after the other in one process."""
    rounds = [{"name": "all", "ask": [question.id for question in exam.questions], "sampling": {"max_tokens": 4}}]
    options = {"max_model_len": 2048, "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 2, "video": 0, "audio": 0}}
    plans = [
        {"name": name, "model": str(folder), "config": models.read_config(folder), "options": options, "rounds": rounds}
        for name, folder in exam.folders.items()
    ]
    lines = [{"id": question.id, "messages": question.messages} for question in exam.questions]
    job = {"engines": plans, "media": str(exam.media)}
    with contextlib.closing(conformance.ENGINE.events(job, lines, exam.media, 600, 600)) as events:
        ready, *answers = [event for event in events if event["event"] in ("ready", "answer")]
    return ready["engine"]["version"], {event["id"]: event for event in answers}


def check(exam: Exam) -> str:
    """Returns vLLM's version."""
    (version, answers), wrong = answered(exam), {}
    for (name, number), expected in exam.expected.items():
        if "error" in answers[name]:
            wrong[name] = answers[name]["error"]
            continue
        record = answers[name]["rounds"]["all"][number]
        gaps = [abs(math.exp(value) - math.exp(expected.first[token])) for token, value in record["best"][0]]
        if record["prompt"] != expected.prompt or max(gaps) > 0.02:
            wrong[name] = f"{number}: {len(record['prompt'])} tokens, probabilities {max(gaps):.3f} apart"
    assert wrong == {}
    return version


@pytest.fixture(scope="module")
def few(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Exam:
    return ask_transformers(world, tmp_path_factory.mktemp("few"), FEW)


@pytest.mark.slow
def test_a_few(few: Exam) -> None:
    check(few)


def test_a_few_in_the_other_vllm(few: Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/test --slow` runs all tests of engines there."""
    monkeypatch.setenv("PYTHONPATH", lane.environment()["PYTHONPATH"])
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert check(few) == "0.33.0"


@pytest.mark.slow
@pytest.mark.parametrize("pair", SERVED, ids=" ".join)
def test_all(world, tmp_path, pair):
    check(ask_transformers(world, tmp_path, [combination for combination in REST if combination[:2] == pair]))

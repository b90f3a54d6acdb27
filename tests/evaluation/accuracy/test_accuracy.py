"""The choice of questions, the scores of answers; and one evaluation in the real engine."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.kit.tiny import build
from vlmcompress import engines
from vlmcompress.evaluation.accuracy.accuracy import EvalOptions, evaluate
from vlmcompress.evaluation.accuracy.scoring import normalise
from vlmcompress.evaluation.accuracy.tasks import stratified
from vlmcompress.evaluation.report.files import write_report
from vlmcompress.evaluation.results import Results, Scored
from vlmcompress.models.data.samples import Sample
from vlmcompress.utils.errors import UserError

VLLM = EvalOptions(engines.get_engine("vllm"), engines.get_engine("vllm"))


def samples(**families: int) -> list[Sample]:
    return [Sample(f"{name}{i}", (), "q", "a", name) for name, n in families.items() for i in range(n)]


def test_stratified_is_proportional_and_deterministic() -> None:
    pool = samples(a=60, b=30, c=10)
    chosen = stratified(pool, 20, seed=0)
    assert Counter(s.family for s in chosen) == {"a": 12, "b": 6, "c": 2}
    assert chosen == stratified(list(pool), 20, seed=0)
    assert {s.id for s in chosen} == {s.id for s in stratified(pool[::-1], 20, seed=0)}
    assert {s.id for s in chosen} != {s.id for s in stratified(pool, 20, seed=1)}
    assert {s.id for s in stratified(pool, 10, seed=0)} < {s.id for s in chosen}


@pytest.mark.parametrize("limit", [1, 2, 7, 99])
def test_stratified_samples_have_the_requested_size(limit: int) -> None:
    assert len(stratified(samples(a=33, b=33, c=34), limit, seed=0)) == limit


def test_a_sample_of_everything_is_everything() -> None:
    pool = samples(a=3)
    assert stratified(pool, None, 0) == stratified(pool, 5, 0) == pool
    with pytest.raises(UserError, match="--limit 0: must be at least 1"):
        stratified(pool, 0, 0)


# ---- bad input: nothing of this starts an engine


def write_rows(file: Path, *rows: dict) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    Image.new("RGB", (30, 30), "red").save(tmp_path / "a.png")
    return tmp_path


def test_missing_checkpoints(folder: Path) -> None:
    with pytest.raises(UserError, match="nothing: no such checkpoint folder"):
        evaluate(folder / "model", folder / "nothing", [None], None, VLLM)
    (folder / "model" / "config.json").unlink()
    with pytest.raises(UserError, match="not a checkpoint, it has no config.json"):
        evaluate(folder / "model", folder / "model", [None], None, VLLM)


def test_data_of_no_model(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no data is bundled with .*; give data \(--data FILE"):
        evaluate(folder / "model", folder / "model", [None], None, VLLM)


def test_missing_image_is_named(folder: Path) -> None:
    data = write_rows(folder / "data.jsonl", {"image": "gone.png", "question": "q", "answer": "a"})
    with pytest.raises(UserError, match="gone.png"):
        evaluate(folder / "model", folder / "model", [data], None, VLLM)


# ---- the real engine


@pytest.mark.engine
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_evaluation_in_a_real_engine(engine: str, tmp_path: Path, quick_engines) -> None:
    """Baseline: a tiny random model. Candidate: the same with its LM head's rows shifted, so that it gives other answers.

    The expected answers are those of the baseline (found in a first evaluation of it against its twin), so it must be right
    everywhere and the candidate nowhere. The journal has its answers from the first time.
    """
    baseline = build("qwen2_5_vl", tmp_path / "base")
    twin = Path(shutil.copytree(baseline, tmp_path / "twin"))
    os.utime(twin / "config.json")  # a checkpoint of its own to the journal
    candidate = Path(shutil.copytree(baseline, tmp_path / "changed"))
    tensors = load_file(candidate / "model.safetensors")
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], 7, 0).contiguous()
    save_file(tensors, candidate / "model.safetensors", metadata={"format": "pt"})
    for i in range(12):
        Image.new("RGB", (56 + 28 * (i % 2), 84), (20 * i, 0, 0)).save(tmp_path / f"{i}.png")
    rows = [{"id": f"q{i}", "image": [[f"{i}.png"], [f"{i}.png", "0.png"], []][i % 3], "question": f"what {i}",
             "answer": "?", "family": ("one", "two", "none")[i % 3]} for i in range(12)]  # fmt: skip

    data = write_rows(tmp_path / "data.jsonl", *rows)
    options = EvalOptions(
        engines.get_engine(engine), engines.get_engine(engine), journal=tmp_path / "report" / "answers.jsonl"
    )
    first = evaluate(twin, baseline, [data], None, options)
    (suite,) = first.suites
    assert suite.agreement == 1.0 and suite.overall.neither == 12 and not first.pictures
    assert suite.overall.low < 0 < suite.overall.high and suite.overall.verdict == "inconclusive"
    assert suite.divergence is not None and suite.divergence.mean < 1e-6 and suite.divergence.same_first == 1.0

    output = {s.id: s.baseline for s in first.samples}
    # No reference is longer than 32 characters: a longer one would let the models write on.
    expected = {identity: text.upper() + "."[: 32 - len(text)] for identity, text in output.items()}
    rows = [row | {"answer": expected[row["id"]]} for row in rows if normalise(output[row["id"]])]
    data = write_rows(tmp_path / "data.jsonl", *rows)
    second = evaluate(candidate, baseline, [data], None, replace(options, baseline_engine=Dead(engine)))
    (suite,) = second.suites
    assert suite.overall.baseline == 1.0 and suite.overall.candidate == 0.0
    assert suite.overall.high < 0 and suite.overall.verdict == "fail"
    assert set(suite.families) <= {"one", "two", "none"}
    assert second.baseline.weight_bytes == second.candidate.weight_bytes > 0
    assert suite.divergence is not None and suite.divergence.mean > 1e-5  # a random model is sure of nothing
    assert {len(pictures) for pictures in second.pictures.values()} <= {0, 1, 2} and second.pictures

    # The report of an evaluation is a baseline, too; its journal has the candidate's answers, so that no engine starts.
    write_report(second, tmp_path / "report")
    third = evaluate(candidate, tmp_path / "report", [data], None, replace(options, engine=Dead(engine)))
    assert third.suites[0].overall == suite.overall and third.samples == without_divergence(second)
    write_rows(data, *rows[1:])
    with pytest.raises(UserError, match="answered different samples"):
        evaluate(candidate, tmp_path / "report", [data], None, replace(options, engine=Dead(engine)))


class Dead:
    """An engine that must not be needed."""

    local = True

    def __init__(self, name: str):
        self.name = name

    def answer(self, *_args, **_kwargs):
        raise AssertionError("everything is in the journal")


def without_divergence(results: Results) -> list[Scored]:
    return [sample.model_copy(update={"kl": None}) for sample in results.samples]

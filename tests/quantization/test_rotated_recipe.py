"""`rotate` of a recipe: what is written answers as before, whatever is done to it, and what cannot be is refused in a line."""

from __future__ import annotations

import pytest
import torch

from tests.kit import vllm_answers
from tests.kit.engine import asked
from tests.kit.inputs import encode
from tests.kit.spread import spread
from vlmcompress import cli, models
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.models import Source
from vlmcompress.quantization.plan import make_plan
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    """Qwen3-VL: deepstack, shared key and value heads, a head that shares the embedding's weights."""
    return spread(checkpoint("qwen3-vl"), tmp_path_factory.mktemp("rotated") / "model", torch.bfloat16)


def recipe(model, out, samples=None, **overrides):
    data = {"calibrate": {"data": str(samples), "samples": 4}} if samples else {}
    return resolve(
        {"model": str(model), "out": str(out), "scheme": "none", "rotate": "hadamard", **data, **overrides}
    ).recipe


def logits(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).logits.float()


def likeness(model, out) -> float:
    """The least cosine of the logits that transformers computes from the source and from OUT."""
    vlm = models.load(model)
    with models.quiet_transformers():
        written = models.open_model(out, dtype="auto")[0].eval()
    batch = encode(vlm, 2)
    return float(torch.cosine_similarity(logits(vlm.model, batch), logits(written, batch), dim=-1).min())


def test_a_rotated_model_without_quantization_is_the_same_model(model, tmp_path):
    """All that changes is BF16's rounding. OUT is whole, its size is as planned, and nothing is left next to it."""
    asked_for = recipe(model, tmp_path / "out")
    done = quantize(asked_for)
    assert likeness(model, done.out) > 0.999
    assert not [finding for finding in doctor.diagnose(done.out) if not finding.ok]
    planned = make_plan(asked_for, strict=False)
    assert done.manifest["size"]["weights_after"] == planned.bytes_after
    assert done.manifest["size"]["weights_before"] == planned.bytes_before == models.checkpoint_bytes(model)
    assert "output head" in done.manifest["warnings"][0] and done.manifest["recipe"]["rotate"] == "hadamard"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Source.of(done.out).names["lm_head.weight"] and not models.tied_names(models.build_meta_model(done.out))
    quantize(recipe(model, tmp_path / "again"))
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (done.out / name).read_bytes()


@pytest.mark.parametrize("scheme", ["gptq", "awq", "int8"])
def test_quantized_rotated_models_answer(scheme, model, samples, tmp_path):
    """The schemes see a plain model: OUT loads and answers much as the source does."""
    done = quantize(recipe(model, tmp_path / "out", samples, scheme=scheme))
    assert likeness(model, done.out) > 0.93
    assert not [finding for finding in doctor.diagnose(done.out) if not finding.ok]
    errors = done.manifest["errors"]
    assert errors and max(e for by_modality in errors.values() for e in by_modality.values()) < 0.1


def test_budget_with_data(model, samples, tmp_path):
    """Statistics that are collected on the way are of the rotated model that is there already."""
    quantize(recipe(model, tmp_path / "out", samples, scheme="gptq", bits={"budget": 6.0}))
    assert likeness(model, tmp_path / "out") > 0.95
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


BAD = {
    "rotate is \"walsh\", it should be 'hadamard' or 'random'": ["--rotate", "walsh"],
    "--seed: invalid int value: 'three'": ["--seed", "three"],
    'seed is "three", it should be a valid integer': ["--set", "seed=three"],
    "ranks visual tokens by single channels": ["--reduce", "dart:0.5"],
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(line, model, tmp_path, capsys):
    arguments = ["quantize", str(model), "-o", str(tmp_path / "out"), "--scheme", "none"]
    rotated = [] if "--rotate" in BAD[line] else ["--rotate", "hadamard"]
    try:
        code = cli.main([*arguments, *rotated, *BAD[line]])
    except SystemExit as stopped:  # of argparse
        code = stopped.code
    output = capsys.readouterr().err
    assert code == 2 and line in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())


def test_unsupported_families_are_refused_before_anything_is_read(checkpoint, tmp_path, capsys):
    arguments = ["quantize", str(checkpoint("gemma3")), "-o", str(tmp_path / "out"), "--scheme", "rtn", "--dry-run"]
    assert cli.main([*arguments, "--rotate", "hadamard"]) == 2
    assert "norms compute x * (1 + weight)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["llava", "qwen3-vl", "smolvlm"])
def test_vllm_answers_as_transformers(name, checkpoint, loaded, samples, tmp_path):
    """Oracle: transformers, on the source. vLLM's tokens from the rotated checkpoint are among its best."""
    done = quantize(recipe(checkpoint(name), tmp_path / "out"))
    (answers,) = asked("answers", vllm_answers.jobs([done.out]))
    assert "error" not in answers, answers
    vlm = loaded(name)
    for count, got in enumerate(answers["answers"], start=1):
        batch = encode(vlm, count)
        assert got["prompt"] == batch["input_ids"][0].tolist()
        assert vllm_answers.gap(vlm.model, batch, got["answer"]) < 0.1

"""`vlmcompress recover` from end to end on tiny models, how it continues, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.kit import calibration_rows
from tests.kit.command_line import run
from tests.kit.next_steps import follow
from tests.kit.recovering import divergence
from vlmcompress.models import load
from vlmcompress.models.data import encode, load_samples
from vlmcompress.recipe import Recipe, resolve
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import learned
from vlmcompress.training import distillation
from vlmcompress.training.recover import TrainingOptions, recover
from vlmcompress.utils.errors import UserError

FEW = ("--steps", 4, "--every", 2, "--batch", 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows over three kinds of image only, so that what is held out is like what is trained on."""
    return calibration_rows.write(tmp_path_factory.mktemp("data"), 24, kinds=3)


def test_a_recovered_checkpoint_has_all_its_files(models, data, tmp_path, capsys):
    """It loads, carries the reducer, is close to the original after it, passes the doctor, and can be quantized."""
    model, out = models["qwen2-5-vl"], tmp_path / "out"
    arguments = ("--reduce", "divprune:0.25", "--calib", data, "-o", out, "--steps", 12, "--every", 4, "--lr", 1e-3)
    code, text, err = run(capsys, "recover", model, *arguments, "--json")
    assert code == 0, err
    data_out = json.loads(text)
    assert follow(data_out["next"], data, tmp_path) == ["eval", "quantize"]
    kl = data_out["recovery"]["held_out_kl"]
    assert data_out["recovery"]["changed"] and 0 < kl["after"] < kl["before"]
    assert data_out["recovery"]["samples"] == {"trained_on": 16, "held_out": 8, "answers_of_the_teacher": 0}
    assert divergence(model, out, data) == pytest.approx(kl["after"], rel=1e-3)
    config = json.loads((out / "config.json").read_text())
    assert config["vlmcompress"]["reduce"]["method"] == "divprune" and "quantization_config" not in config
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in before.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in after.items()
    }
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any("q_proj" in key for key in changed) and not any("embed_tokens" in key for key in changed)
    code, text, _ = run(capsys, "doctor", out, "--source", model)
    assert code == 0, text
    card = (out / "README.md").read_text()
    assert "## Recovered" in card and "no weight depends on it" not in card and "as they were." not in card
    again = tmp_path / "int4"
    code, _, err = run(capsys, "quantize", out, "--reduce", "divprune:0.25", "--scheme", "rtn", "-o", again)
    assert code == 0, err
    assert not (tmp_path / ".out.work").exists()


def test_the_student_computes_what_the_reduced_model_generates(models, data):
    """With every token kept it is the teacher; and nothing before the answer sees it."""
    for model in models.values():
        vlm = load(model, dtype=torch.float64)
        batch = encode(load_samples(data, samples=1, seed=0), vlm)[0]
        batch = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in batch.items()}
        cut, count = distillation.answer_tokens(batch)
        with torch.no_grad():
            teacher = distillation.whole_logits(vlm, batch)
            assert teacher.shape[0] == count > 1
            assert torch.allclose(distillation.student_logits(vlm, batch), teacher, rtol=1e-9, atol=1e-9)
            other = dict(batch)
            other["input_ids"] = batch["input_ids"].clone()
            other["input_ids"][:, cut] += 1
            with attach(vlm, "coverage", {"keep": 0.5}):
                first, second = (distillation.student_logits(vlm, tensor) for tensor in (batch, other))
            assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


@pytest.mark.parametrize(("name", "reduce"), [("llava", "visionzip:0.5"), ("qwen2-5-vl", "dart:0.5")])
def test_gradients_reach_the_projector_through_every_kind_of_reducer(models, data, name, reduce):
    vlm = load(models[name], dtype=torch.float32)
    batch = encode(load_samples(data, samples=1, seed=0), vlm)[0]
    weights = [weight for key, weight in vlm.model.named_parameters() if key.startswith(vlm.spec.projector[0])]
    for weight in weights:
        weight.requires_grad_()
    chosen = resolve({"model": str(models[name]), "scheme": "none", "reduce": reduce}).recipe.reduce
    with attach(vlm, chosen), distillation.graph(vlm):
        distillation.student_logits(vlm, batch).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in weights if weight.ndim == 2)


def test_a_run_with_another_scorer_starts_anew(models, data, tmp_path):
    """Of the same name, with another content."""
    model, path = models["llava"], tmp_path / "scorer.safetensors"
    width = load(model).model.config.get_text_config().hidden_size
    facts = {"model_type": "llava", "source": "mine", "width": width, "hidden": 4, "keep": 0.5}

    def trained(seed: int) -> None:
        scorer_file.save_scorer(path, learned.initial(torch.zeros(width), torch.ones(width), 4, seed), facts)

    def broken(label: str, _done: int, _total: int) -> None:
        if label == "recovering":  # all of the teacher's outputs are kept by then
            raise KeyboardInterrupt

    keys = {"data": str(data), "samples": 24}
    reduce = f"learned:0.5,scorer={path}"
    recipe = Recipe.of(model, tmp_path / "out", scheme="none", reduce=reduce, calibrate=keys)
    trained(seed=0)
    with pytest.raises(KeyboardInterrupt):
        recover(recipe, TrainingOptions(), progress=broken)
    with pytest.raises(KeyboardInterrupt):
        recover(recipe, TrainingOptions(), progress=broken)
    trained(seed=1)
    with pytest.raises(UserError, match="an interrupted run with a reducer's file with the hash "):
        recover(recipe, TrainingOptions())


def test_the_model_answers_where_the_data_do_not(models, data, tmp_path, capsys):
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row in rows[:20]:
        row.pop("answer")
    asking = data.parent / "asking.jsonl"
    asking.write_text("\n".join(map(json.dumps, rows)))
    arguments = (
        "--reduce",
        "divprune:0.25",
        "--calib",
        asking,
        "-o",
        tmp_path / "out",
        *FEW,
        "--json",
        "--samples",
        24,
    )
    code, text, err = run(capsys, "recover", models["llava"], *arguments)
    assert code == 0, err
    assert 16 <= json.loads(text)["recovery"]["samples"]["answers_of_the_teacher"] <= 20


def test_weights_stay_where_training_gains_nothing(models, data, tmp_path, capsys):
    model, out = models["llava"], tmp_path / "out"
    arguments = (
        "--reduce",
        "divprune:0.25",
        "--calib",
        data,
        "-o",
        out,
        *FEW,
        "--lr",
        0.9,
        "--train",
        "norms,projector",
    )
    code, text, err = run(capsys, "recover", model, *arguments)
    assert code == 0, err
    assert "Nothing was better than the original weights" in text and "no better" in text and "it diverged" in text
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert run(capsys, "doctor", out, "--source", model)[0] == 0


def test_the_tower_is_trained_on_smaller_images(models, data, tmp_path, capsys):
    """The student sees images that the processor has made smaller, the teacher those that it had."""
    big = calibration_rows.write(tmp_path, 20)
    for row in range(20):
        Image.open(tmp_path / f"{row}.png").resize((224, 224)).save(tmp_path / f"{row}.png")
    arguments = ("--reduce", "resize:0.5", "--reduce", "divprune:0.5", "--calib", big, "-o", tmp_path / "out", *FEW)
    code, text, err = run(capsys, "recover", models["qwen2-5-vl"], *arguments, "--train", "tower,projector", "--json")
    assert code == 0, err
    facts = json.loads(text)
    assert facts["resize"]["tokens"] and set(facts["recovery"]["parameters"]) == {"tower", "projector"}
    assert facts["recovery"]["held_out_kl"]["before"] > 0


def test_missing_parts_are_refused(models):
    with pytest.raises(UserError, match="no part 'lors'; did you mean 'lora'"):
        TrainingOptions(train=("lors",))

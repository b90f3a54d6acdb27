"""The fast evaluator against slow ones: packed rows against the model's own forward pass, teacher forcing and generation."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from tests.kit.places import DEMOS, ROOT
from vlmcompress import models
from vlmcompress.engines import EngineSettings, Request, get_engine
from vlmcompress.evaluation.accuracy.scoring import normalise
from vlmcompress.models.data import Sample, bundled_data, encode, load_samples
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import paired
import teacher_forcing


def several(model: str, per_family: int) -> list[Sample]:
    """Neighbouring questions of each family: some share images, some have two, some none."""
    samples = load_samples(bundled_data(DEMOS / model, "validation"), samples=None, seed=0, decode_images=False)
    return [
        s
        for family in sorted({s.family for s in samples})
        for s in [o for o in samples if o.family == family][:per_family]
    ]


@pytest.mark.parametrize("model", [pytest.param("demo-llava", marks=pytest.mark.slow), "demo-qwen"])
def test_packed_questions_are_answered_as_alone(model: str) -> None:
    """The oracle runs the whole model on one question at a time, with positions of its own making."""
    samples = several(model, 3)
    vlm = models.load(DEMOS / model, dtype=torch.float32)
    batches = teacher_forcing.pack(teacher_forcing.encode_questions(vlm, samples), tokens=1500)
    assert len(batches) > 1 and sum(len(rows.embeds) for rows in batches) < len(samples)
    logits, label, question = teacher_forcing.predictions(vlm, batches)
    for number, sample in enumerate(samples):
        (inputs,) = encode([sample], vlm)
        answer = inputs.pop("modality")[0] == 3
        with torch.no_grad():
            alone = vlm.model(**inputs).logits[0]
        assert torch.equal(label[question == number], inputs["input_ids"][0][answer.roll(1)])
        torch.testing.assert_close(logits[question == number], alone[answer], atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """demo-llava at 2 bits without calibration, which answers many questions wrongly."""
    out = tmp_path_factory.mktemp("methods") / "rtn-2"
    keys = {"model": str(DEMOS / "demo-llava"), "out": str(out), "scheme": "rtn"}
    quantize(resolve(keys | {"options": {"bits": 2, "group_size": -1}}).recipe)
    return out


@pytest.mark.slow
def test_exact_match_is_that_of_generation(lossy: Path, tmp_path: Path, quick_engines) -> None:
    """Greedy answers of the engine, in BF16 as they are given to users, against teacher forcing in float32."""
    samples, requests = several("demo-llava", 20), []
    for sample in samples:
        content = [{"type": "text", "text": sample.question}]
        for at, image in reversed(list(enumerate(sample.images))):
            image.save(tmp_path / f"{sample.id}-{at}.png")
            address = (tmp_path / f"{sample.id}-{at}.png").as_uri()
            content.insert(0, {"type": "image_url", "image_url": {"url": address}})
        requests.append(Request(sample.id, [{"role": "user", "content": content}]))
    answers = get_engine("hf").answer(lossy, requests, media=tmp_path, settings=EngineSettings(max_tokens=16)).answers
    generated = [normalise(answers[sample.id].text) == normalise(sample.answer or "") for sample in samples]

    original = models.load(DEMOS / "demo-llava")
    batches = teacher_forcing.pack(teacher_forcing.encode_questions(original, samples))
    predicted = teacher_forcing.predictions(teacher_forcing.load_quantized(lossy, original), batches)
    exact = teacher_forcing.measure(predicted[0], *predicted)["exact"].bool().tolist()
    assert 20 < sum(generated) < 180
    different = [
        sample.id
        for sample, generated_text, other in zip(samples, generated, exact, strict=True)
        if generated_text != other
    ]
    assert len(different) <= 2, different  # of 200: two nearly equal logits, which BF16 may put the other way round


def test_measures() -> None:
    """Two questions of two tokens and one, against sums written out."""
    torch.manual_seed(0)
    original, quantized = torch.randn(3, 5), torch.randn(3, 5)
    label, question = torch.tensor([1, 4, 2]), torch.tensor([0, 0, 1])
    quantized[2, 2] = 9
    measures = teacher_forcing.measure(original, quantized, label, question)
    p, q = original.double().softmax(-1), quantized.double().softmax(-1)
    kl = [sum(float(p[i, v] * math.log(p[i, v] / q[i, v])) for v in range(5)) for i in range(3)]
    assert measures["kl"].tolist() == pytest.approx([kl[0], kl[2]])
    assert measures["path"].tolist() == pytest.approx([(kl[0] + kl[1]) / 2, kl[2]])
    assert measures["nll"].tolist() == pytest.approx([-math.log(q[0, 1]) - math.log(q[1, 4]), -math.log(q[2, 2])])
    right = [all(int(quantized[i].argmax()) == int(label[i]) for i in tokens) for tokens in ([0, 1], [2])]
    assert measures["exact"].tolist() == right and right[1]
    error = (quantized - original)[2].double()
    spread = float(((original[2] - original[2].mean()) ** 2).mean())
    assert measures["logit"][1] == pytest.approx(float(((error - error.mean()) ** 2).mean()) / spread)


def test_activations_are_rounded_by_the_scheme(tmp_path: Path) -> None:
    """The input of every quantized layer has 255 levels for each token; without quantized layers nothing happens."""
    original = models.load(DEMOS / "demo-llava")
    assert teacher_forcing.round_activations(original.model) == []
    keys = {"model": str(DEMOS / "demo-llava"), "out": str(tmp_path / "int8"), "scheme": "int8"}
    quantize(resolve(keys | {"calibrate": {"samples": 2}}).recipe)
    vlm = teacher_forcing.load_quantized(tmp_path / "int8", original)
    hooks = teacher_forcing.round_activations(vlm.model)
    assert len(hooks) == 28
    layer, x, inputs = vlm.model.model.language_model.layers[0].mlp.down_proj.float(), torch.randn(3, 512), []
    layer.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    layer(x)
    for token, rounded in zip(x, inputs[0], strict=True):
        scale = token.abs().max() / 127
        assert torch.allclose(rounded, torch.round(token / scale) * scale)
    # nothing else is rounded, and gradients pass as if nothing were
    y = x.clone().requires_grad_()
    assert torch.equal(layer(y), torch.nn.functional.linear(inputs[-1], layer.weight, layer.bias))
    layer(y).sum().backward()
    assert y.grad is not None and torch.allclose(y.grad, layer.weight.sum(0).expand(3, -1), atol=1e-5)


def test_a_difference_counts_images_and_seeds() -> None:
    """Without clusters: the textbook's standard error; every question twice: as few as there are images."""
    torch.manual_seed(0)
    d = torch.randn(1, 40, dtype=torch.float64)
    alone = paired.difference(d, torch.arange(40))
    assert alone["error"] == pytest.approx(float(d.std(correction=0)) / 40**0.5)
    twice = paired.difference(d.repeat(1, 2), torch.arange(40).repeat(2))
    assert twice["error"] == pytest.approx(alone["error"]) and twice["z"] == pytest.approx(alone["z"])
    seeds = paired.difference(torch.tensor([[0.0] * 8, [1.0] * 8], dtype=torch.float64), torch.arange(8))
    assert seeds["difference"] == 0.5 and seeds["error"] == pytest.approx(0.5)  # std of (0, 1) over sqrt(2)

"""Samples that run together: which do, and that their gradients are those of samples that run alone, on every family."""

from __future__ import annotations

import pytest
import torch

from tests.kit.batched_samples import samples, wide
from tests.kit.pictures import picture, refused
from vlmcompress.models import VLM, devices
from vlmcompress.models.data import Sample, encode
from vlmcompress.models.data.video import Video
from vlmcompress.quantization.calibration import gradient_pass
from vlmcompress.quantization.calibration.block_inputs import bucket_by_length, capture_block_inputs, collate
from vlmcompress.quantization.inputs import naming
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks.calibration_inputs import decoder, reduced
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives


def alone(rows) -> list[list[int]]:
    return [[index] for index in range(len(rows))]


def same_together_and_alone(vlm: VLM, rows, monkeypatch) -> None:
    groups = bucket_by_length(rows)
    lengths = [{rows[index]["modality"].shape[1] for index in group} for group in groups]
    assert sorted(sum(groups, [])) == list(range(len(rows)))
    assert len(groups) < len(rows) and any(len(bucket) > 1 for bucket in lengths), "the test needs a batch with padding"
    reports: list[tuple] = []
    computed = gradient_pass.gradients(vlm, rows, lambda *what: reports.append(what))
    assert reports[0] == ("gradients", 0, len(rows)) and reports[-1] == ("gradients", len(rows), len(rows))
    monkeypatch.setattr(gradient_pass, "bucket_by_length", alone)
    expected = gradient_pass.gradients(vlm, rows)
    assert computed.loss == pytest.approx(expected.loss, rel=1e-5) and computed.samples == expected.samples
    for ours, theirs in zip(computed.blocks, expected.blocks, strict=True):
        for name, gradient in theirs.items():
            assert ours[name].channels == gradient.channels
            assert ours[name].absolute == pytest.approx(gradient.absolute, rel=1e-4), name
            assert ours[name].square == pytest.approx(gradient.square, rel=1e-4), name


def test_gradients_are_those_of_single_samples(family, loaded, monkeypatch):
    """Padding is in no statistic and moves no token's position, among images of several counts and sizes."""
    vlm = wide(loaded(family))
    same_together_and_alone(vlm, encode(samples(), vlm), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl"])
def test_videos_run_together(model, loaded, monkeypatch):
    """Videos of several lengths, whose patches stand one after another or whose frames don't, among images and text."""
    vlm = wide(loaded(model))
    films = [Video([picture(84, 56, seed) for seed in range(count)], "x") for count in (4, 2, 2, 2)]
    filmed = [Sample(f"v{n}", (), "what" + n * "?", "red", videos=(film,)) for n, film in enumerate(films)]
    same_together_and_alone(vlm, encode([*samples(), *filmed], vlm), monkeypatch)


def test_samples_that_the_model_raises_for_are_named(loaded):
    """Those alone, of a batch with others; where it raises for all, that is no fault of a sample's."""
    vlm = loaded("llava")
    rows = encode([Sample(f"s{n}", (), "what" + n * "?", "red") for n in range(6)], vlm)
    mark = vlm.processor.tokenizer("?", add_special_tokens=False)["input_ids"][0]

    def refuse(_, args) -> None:
        if any(count in (2, 5) for count in (args[0] == mark).sum(1).tolist()):
            raise RuntimeError("too odd")

    names = [f"row {number}" for number in range(6)]
    hook = vlm.model.get_input_embeddings().register_forward_pre_hook(refuse)
    try:
        refused(lambda: capture_block_inputs(vlm, rows), "cannot take 2 of the samples", "RuntimeError: too odd")
        message = r"^row 2: the model raises \(RuntimeError: too odd\); drop it; so it does for 1 other$"
        with pytest.raises(UserError, match=message), naming(names):
            capture_block_inputs(vlm, rows)
        with pytest.raises(RuntimeError, match="too odd"):
            capture_block_inputs(vlm, [rows[2], rows[5]])
    finally:
        hook.remove()


@pytest.mark.parametrize("model", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_inputs_are_those_of_the_reduced_model(model, loaded, monkeypatch):
    """Inputs of a decoder alone, whose positions (three a token) and features of the first layers stand along other axes."""
    vlm, chosen = wide(loaded(model)), parse_reducer("uniform:0.5")
    rows = reduced(vlm, encode(samples(), vlm), chosen)
    same_together_and_alone(decoder(vlm), rows, monkeypatch)


def sample(length: int, **overrides) -> dict[str, torch.Tensor]:
    ids = torch.ones(1, length, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": ids, "modality": ids.byte(), **overrides}


def test_samples_that_share_a_batch():
    """Like lengths up to a number of tokens, equal inputs, and without a mask equal lengths only."""
    assert bucket_by_length([sample(n) for n in (40, 10, 41, 39, 15)]) == [[1], [4], [3, 0, 2]]
    assert bucket_by_length([sample(n) for n in (40, 41, 42)], tokens=100) == [[0, 1], [2]]
    assert bucket_by_length([sample(500)], tokens=100) == [[0]] and bucket_by_length([]) == []
    full = {
        length: [len(batch) for batch in bucket_by_length([sample(length)] * 5, tokens=100)]
        for length in (49, 50, 51, 100)
    }
    assert full == {49: [2, 2, 1], 50: [2, 2, 1], 51: [1] * 5, 100: [1] * 5}
    pixels = [torch.zeros(n, 3, 8, side) for n, side in ((1, 8), (2, 8), (1, 9))]
    assert sorted(bucket_by_length([sample(40), *(sample(40, pixel_values=images) for images in pixels)])) == [
        [0],
        [1, 2],
        [3],
    ]
    bare = [{key: value for key, value in sample(n).items() if key != "attention_mask"} for n in (40, 41, 40)]
    assert bucket_by_length(bare) == [[0, 2], [1]]


def test_padding_is_on_the_left_and_looks_like_no_image():
    short, long = sample(2), sample(4)
    short["input_ids"], short["modality"] = torch.tensor([[9, 5]]), torch.tensor([[2, 3]], dtype=torch.uint8)
    batch = collate([short, long])
    assert batch["input_ids"].tolist() == [[5, 5, 9, 5], [1, 1, 1, 1]]
    assert batch["modality"].tolist() == [[0, 0, 2, 3], [1, 1, 1, 1]] and batch["modality"].dtype == torch.uint8
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_products_in_float32(loaded, monkeypatch):
    """Near the 16-bit products, which stay away where they are slow; on a processor that has them nothing changes."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    vlm = loaded("llava")
    rows, exact = encode(samples(), vlm), gradient_pass.gradients(wide(vlm), encode(samples(), vlm))
    used: list[torch.dtype] = []
    linear = vlm.model.get_submodule("model.language_model.layers.0.mlp.up_proj")

    def note(_module, _args, output):
        used.append(output.dtype)

    with linear.register_forward_hook(note):
        for instructions in ({}, {"avx512_bf16": True}):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=instructions: has, raising=False)
            assert devices.emulated(torch.bfloat16) is not bool(instructions)
            computed = gradient_pass.gradients(vlm, rows)
            assert computed.loss == pytest.approx(exact.loss, rel=1e-2)
            for ours, theirs in zip(computed.blocks, exact.blocks, strict=True):
                for name, gradient in theirs.items():
                    assert ours[name].absolute == pytest.approx(gradient.absolute, rel=0.1), name
    assert set(used) == {torch.bfloat16} and not devices.emulated(torch.float32)


def test_weights_are_multiplied_in_float32():
    """The product of rounded factors in float32, rounded once; a weight that is left out and other types are untouched."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64).bfloat16().requires_grad_(), torch.randn(8, 64).bfloat16()
    with devices.FloatProducts(torch.bfloat16):
        y = torch.nn.functional.linear(x, weight)
    assert y.dtype == torch.bfloat16 and torch.equal(y, (x.float() @ weight.float().T).bfloat16())
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weight.float().sum(0).bfloat16().expand_as(x))
    with devices.FloatProducts(torch.bfloat16, but=weight):
        kept = torch.nn.functional.linear(x, weight)
    assert torch.equal(kept, torch.nn.functional.linear(x, weight))

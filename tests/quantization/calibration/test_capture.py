"""Captured inputs are those in the whole model, sample by sample, on every family; a block's new output is passed on."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.kit.batched_samples import samples, wide
from vlmcompress.models import VLM, Expert, decoder_blocks
from vlmcompress.models.data import encode
from vlmcompress.numerics.statistics.inputs import MODALITIES, STATISTICS
from vlmcompress.numerics.statistics.tokens import thinned
from vlmcompress.quantization.calibration import block_inputs
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.calibration.routed import routed_to_all
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks.calibration_inputs import decoder, reduced
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives

Rows = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]  # linear layer -> for each sample, its input and modalities


def inputs(vlm: VLM, batches) -> Rows:
    """The oracle: the whole model runs over one sample after another, and hooks keep what the layers get."""
    recorded: Rows = {}
    hooks = []
    for groups in decoder_blocks(vlm.model, vlm.spec):
        for group in groups:
            rows = recorded[group.linears[0]] = []
            expert = vlm.model.get_submodule(group.linears[0].rpartition(".")[0])

            def keep(_module, args, rows=rows, expert=expert):
                mask = modality[expert.rows.cpu()] if isinstance(expert, Expert) else modality
                rows.append((args[0].reshape(-1, args[0].shape[-1]).cpu(), mask))

            hooks.append(vlm.model.get_submodule(group.linears[0]).register_forward_pre_hook(keep))
    for batch in batches:
        modality = batch["modality"].flatten()
        with torch.no_grad():
            vlm.model(**{key: value for key, value in batch.items() if key != "modality"}, use_cache=False)
    for hook in hooks:
        hook.remove()
    return recorded


def same(vlm: VLM, batches, spec: CaptureSpec, expected: Rows) -> None:
    blocks, layers = decoder_blocks(vlm.model, vlm.spec), []
    for layer, captured in capture_blocks(vlm, blocks, batches, spec):
        layers.append(layer)
        assert captured is not None and list(captured.stats) == [group.name for group in blocks[layer]]
        for group in blocks[layer]:
            stats, rows = captured.stats[group.name], expected[group.linears[0]]
            for code, name in enumerate(MODALITIES, start=1):
                x = torch.cat([x[mask == code] for x, mask in rows]).double()
                assert stats.count[name] == len(x) > 0
                gram = x.T @ x
                error = (stats.gram({name: 1.0}).cpu().double() - gram).norm()
                assert error <= 2e-5 * gram.norm(), (group.linears[0], name, float(error))
                torch.testing.assert_close(stats._absmax[name].cpu().double(), x.abs().amax(0), rtol=1e-3, atol=1e-4)
                torch.testing.assert_close(stats._abssum[name].cpu().double(), x.abs().sum(0), rtol=1e-3, atol=1e-3)
    assert layers == [layer for layer, groups in enumerate(blocks) if groups]


@pytest.mark.parametrize("prefix", ["float", "quantized"])
def test_statistics_are_those_of_the_whole_model(family, loaded, prefix):
    """Padding is in none, text without an image and images of several sizes and counts run in batches of their own."""
    vlm = wide(loaded(family))
    batches = encode(samples(), vlm)
    buckets = block_inputs.bucket_by_length(batches)
    assert any(len({batches[i]["modality"].shape[1] for i in bucket}) > 1 for bucket in buckets), "no batch has padding"
    with routed_to_all(vlm.model):
        expected = inputs(vlm, batches)
    same(vlm, batches, CaptureSpec(STATISTICS, prefix, all_experts=True), expected)


@pytest.mark.parametrize("model", ["llava", "qwen3_vl"])
def test_statistics_are_those_of_the_reduced_model(model, loaded):
    vlm = wide(loaded(model))
    rows = reduced(vlm, encode(samples(), vlm), parse_reducer("uniform:0.5"))
    after = decoder(vlm)
    same(after, rows, CaptureSpec(STATISTICS), inputs(after, rows))


@pytest.mark.parametrize("model_name", ["llava", "qwen3_vl_moe"])
def test_statistics_of_some_tokens(model_name, loaded):
    """Oracle: the whole model's rows of the tokens that `thinned` leaves, the same in all layers, experts included. As many
    tokens as there are, or more, change no bit."""
    vlm = wide(loaded(model_name))
    batches, spec = encode(samples(), vlm), CaptureSpec(STATISTICS, "quantized", seed=5, all_experts=True)
    masks = [batch["modality"] for batch in batches]
    tokens = sum(int((mask > 0).sum()) for mask in masks)
    fewer = [
        {**batch, "modality": mask} for batch, mask in zip(batches, thinned(masks, tokens // 3, seed=5), strict=True)
    ]
    with routed_to_all(vlm.model):
        expected = inputs(vlm, fewer)
    same(vlm, batches, replace(spec, tokens=tokens // 3), expected)
    blocks = decoder_blocks(vlm.model, vlm.spec)
    every, *same_again = (
        [captured for _, captured in capture_blocks(vlm, blocks, batches, replace(spec, tokens=count))]
        for count in (0, tokens, tokens + 1)
    )
    for again in same_again:
        for expected, captured in zip(every, again, strict=True):
            assert all(torch.equal(x.gram(), captured.stats[name].gram()) for name, x in expected.stats.items())


@pytest.mark.parametrize("model_name", ["llava", "qwen3_vl", "lfm2_vl"])
def test_the_new_output_of_a_changed_block_is_passed_on(model_name, loaded):
    """Oracle: a model whose blocks before are changed. A block that is finished already is changed in its turn, too."""
    vlm = wide(loaded(model_name))
    batches, blocks = encode(samples(), vlm), decoder_blocks(vlm.model, vlm.spec)
    changed = VLM(copy.deepcopy(vlm.model), vlm.processor, vlm.spec, vlm.path)
    first = next(layer for layer, groups in enumerate(blocks) if groups)
    spec = CaptureSpec(STATISTICS, "quantized")
    for layer, captured in capture_blocks(vlm, blocks, batches, spec, finished=lambda layer: layer == first):
        assert (captured is None) is (layer == first)
        if captured is not None:
            expected = inputs(changed, batches)
            for group in blocks[layer]:
                x = torch.cat([x[mask > 0] for x, mask in expected[group.linears[0]]]).double()
                gram = x.T @ x
                assert (captured.stats[group.name].gram().cpu().double() - gram).norm() / gram.norm() < 2e-5
        for model in (vlm.model, changed.model):
            for group in blocks[layer]:
                for name in group.linears:
                    model.get_submodule(name).weight.data.mul_(1.25)


@pytest.mark.parametrize("model_name", ["llava", "qwen3_vl_moe"])
def test_held_out_samples(model_name, loaded):
    """Errors are those on the held-out samples' inputs, of an expert on those routed to it, and no sum is changed by them."""
    vlm = wide(loaded(model_name))
    batches, blocks = encode(samples(), vlm), decoder_blocks(vlm.model, vlm.spec)
    spec, expected = CaptureSpec(STATISTICS), inputs(vlm, batches[-2:])
    alone = [captured for _, captured in capture_blocks(vlm, blocks, batches[:-2], spec)]
    captures = capture_blocks(vlm, blocks, batches, replace(spec, held_out=2))
    layers = [layer for layer, groups in enumerate(blocks) if groups]
    for layer, (_, captured), without in zip(layers, captures, alone, strict=True):
        for group in blocks[layer]:
            stats = captured.stats[group.name]
            assert stats.count == without.stats[group.name].count and without.stats[group.name].held_out is None
            assert torch.equal(stats.gram(), without.stats[group.name].gram())
            w = vlm.model.get_submodule(group.linears[0]).weight.detach().float().cpu()
            scale = torch.rand(w.shape[1]) + 0.5  # smoothed inputs, too
            dw, errors = torch.randn_like(w), dict[str, float]()
            for code, name in enumerate(MODALITIES, start=1):
                x = torch.cat([x[mask == code] for x, mask in expected[group.linears[0]]]).double() / scale
                if len(x):
                    errors[name] = float((x @ dw.double().T).square().sum() / (x @ w.double().T).square().sum())
            if errors:
                assert stats.rescaled(scale).measured.error(dw, w) == pytest.approx(errors, rel=1e-3)


def test_rows_of_all_tokens(loaded):
    """A draw of more tokens than there are takes them all, in the order of the samples, padding left out."""
    vlm = wide(loaded("qwen2_vl"))
    batches, blocks = encode(samples(), vlm), decoder_blocks(vlm.model, vlm.spec)
    expected = inputs(vlm, batches)
    for layer, captured in capture_blocks(vlm, blocks, batches, CaptureSpec(frozenset(), sampled_rows=10_000)):
        rows = torch.cat([x[mask > 0] for x, mask in expected[blocks[layer][0].linears[0]]])
        torch.testing.assert_close(captured.rows, rows, rtol=1e-3, atol=1e-4)


def test_drawn_rows_do_not_depend_on_batches(loaded, monkeypatch):
    """A sample of the inputs, and the rows that are kept of each group, are the same tokens when samples run alone."""
    vlm = wide(loaded("qwen2_5_vl"))
    batches, blocks = encode(samples(), vlm), decoder_blocks(vlm.model, vlm.spec)

    def run():
        spec = CaptureSpec(frozenset({"absmax"}), sampled_rows=20, seed=3)
        return [captured for _, captured in capture_blocks(vlm, blocks, batches, spec)]

    together = run()
    monkeypatch.setattr(block_inputs, "bucket_by_length", lambda rows: [[index] for index in range(len(rows))])
    for ours, theirs in zip(together, run(), strict=True):
        torch.testing.assert_close(ours.rows, theirs.rows, rtol=1e-4, atol=1e-5)
        assert ours.rows.shape[0] == 20
        for group, stats in theirs.stats.items():
            for name, rows in stats.sample().items():
                torch.testing.assert_close(ours.stats[group].sample()[name], rows, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("prefix", ["float", "quantized"])
def test_one_bad_sample_in_a_batch_is_named(loaded, prefix):
    """NaN in one sample's pixels: the message names the sample and the first layer; NaN where nothing counts is no matter."""
    vlm = wide(loaded("llava"))
    batches, blocks = encode(samples(), vlm), decoder_blocks(vlm.model, vlm.spec)
    buckets = [bucket for bucket in block_inputs.bucket_by_length(batches) if len(bucket) > 1]
    bad = next(bucket for bucket in buckets if "pixel_values" in batches[bucket[0]])[-1]
    batches[bad] = {**batches[bad], "pixel_values": batches[bad]["pixel_values"].clone()}
    batches[bad]["pixel_values"][0, 0, 0, 0] = float("nan")
    with pytest.raises(UserError, match=f"layers.0.self_attn.q_proj, calibration sample {bad}: .* NaN or Inf"):
        list(capture_blocks(vlm, blocks, batches, CaptureSpec(STATISTICS, prefix)))
    batches[bad]["modality"] = torch.zeros_like(batches[bad]["modality"])
    assert all(captured for _, captured in capture_blocks(vlm, blocks, batches, CaptureSpec(STATISTICS, prefix)))


def test_the_model_is_left_as_it_was(loaded):
    """Blocks that stubs stood for are back in their places when a sample is refused while it is read."""
    vlm = loaded("llava")
    batches, blocks = encode(samples(), vlm), decoder_blocks(vlm.model, vlm.spec)
    before = dict(vlm.model.named_modules())
    with pytest.raises(ValueError, match="image size"):
        wrong = {**batches[0], "pixel_values": torch.zeros(1, 3, 5, 5)}
        list(capture_blocks(vlm, blocks, [wrong], CaptureSpec(STATISTICS, "quantized")))
    assert list(before.values()) == list(vlm.model.modules())

"""The sensitivity pass: against plain autograd, finite differences, and itself with less memory; on every family."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tests.kit.pictures import picture, refused
from vlmcompress.models import VLM, Expert, decoder_blocks, decoder_layers
from vlmcompress.models.data import Sample, encode
from vlmcompress.numerics.statistics.gradients import Gradients, sensitivities
from vlmcompress.numerics.statistics.inputs import MODALITIES
from vlmcompress.quantization.calibration import gradient_pass
from vlmcompress.quantization.calibration.gradient_pass import gradients

pytestmark = pytest.mark.representatives

NEAR = {"rel": 1e-4, "abs": 1e-12}


def samples() -> list[Sample]:
    """Two with an image and one of text, with answers of different lengths; the last has no answer."""
    return [
        Sample("a", (picture(80, 60),), "what is it", "red"),
        Sample("b", (picture(60, 80, seed=1),), "what?", "a blue one"),
        Sample("c", (), "what is two and two", "four"),
        Sample("d", (picture(),), "what", None),
    ]


@pytest.fixture(scope="module")
def float32(loaded):
    """`float32(family)`: the tiny model in 32 bits, and its encoded samples."""

    def get(family: str) -> tuple[VLM, list[dict[str, torch.Tensor]]]:
        base = loaded(family)
        vlm = VLM(copy.deepcopy(base.model).float(), base.processor, base.spec, base.path)
        return vlm, encode(samples(), vlm)

    return get


def keeper(kept: dict[str, tuple], name: str, parent: torch.nn.Module):
    def keep(_module, _args, output):
        output.retain_grad()
        kept[name] = output, parent.rows if isinstance(parent, Expert) else slice(None)

    return keep


def labels_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The answer's tokens as transformers' own loss reads them."""
    return batch["input_ids"].masked_fill((batch["modality"] != 3).roll(1), -100)


def plain(vlm: VLM, batches) -> dict[str, dict[str, tuple[float, float]]]:
    """The oracle: transformers' own loss of the answers, a graph that is kept, and sums by the definitions."""
    model = vlm.model
    model.get_input_embeddings().weight.requires_grad_(True)
    names = [name for groups in decoder_blocks(vlm.model, vlm.spec) for group in groups for name in group.linears]
    magnitudes = {name: {m: [] for m in MODALITIES} for name in names}
    squares = {name: {m: [] for m in MODALITIES} for name in names}
    for batch in batches:
        kept: dict[str, tuple] = {}
        parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        hooks = [model.get_submodule(name).register_forward_hook(keeper(kept, name, parents[name])) for name in names]
        with torch.enable_grad():
            model(
                **{key: value for key, value in batch.items() if key != "modality"}, labels=labels_of(batch)
            ).loss.backward()
        for hook in hooks:
            hook.remove()
        for name, (output, output_grad) in kept.items():
            codes, grad = batch["modality"][0][output_grad], output.grad.double()
            grad = grad.reshape(len(codes), -1)
            for code, modality in enumerate(MODALITIES, start=1):
                rows = grad[codes == code]
                if len(rows):
                    magnitudes[name][modality].append(rows.abs().mean().item())
                    squares[name][modality] += rows.square().mean(1).tolist()
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    return {
        name: {m: (mean(magnitudes[name][m]), mean(squares[name][m])) for m in MODALITIES if squares[name][m]}
        for name in names
    }


def test_gradients_are_those_of_autograd(family, float32):
    """For every family: the numbers of each layer and modality, and the model is afterwards as it was."""
    vlm, batches = float32(family)
    computed = gradients(vlm, batches)
    assert computed.samples == 3
    for block in map(vlm.model.get_submodule, decoder_layers(vlm.model, vlm.spec)):
        assert "forward" not in vars(block) and not block._forward_pre_hooks
        assert not any(isinstance(m, torch.nn.Linear) and m._forward_hooks for m in block.modules())
    assert all(parameter.grad is None for parameter in vlm.model.parameters())
    expected = plain(vlm, batches[:3])
    ours = {name: gradient for block in computed.blocks for name, gradient in block.items()}
    assert ours.keys() == expected.keys()
    for name, by_modality in expected.items():
        assert ours[name].absolute.keys() == ours[name].square.keys() == by_modality.keys()
        assert by_modality.keys() == set(MODALITIES) or ".experts." in name
        assert ours[name].channels == vlm.model.get_submodule(name).out_features
        for modality, (magnitude, square) in by_modality.items():
            assert ours[name].absolute[modality] == pytest.approx(magnitude, **NEAR), (name, modality)
            assert ours[name].square[modality] == pytest.approx(square, **NEAR), (name, modality)


@pytest.mark.parametrize("model", ["qwen2_5_vl", "llava"])
def test_memory_changes_nothing(model, float32):
    """The same to the last bit with the whole graph kept; weights stay as they are, and where they are."""
    vlm, batches = float32(model)
    before = {name: tensor.data_ptr() for name, tensor in vlm.model.state_dict().items()}
    assert gradients(vlm, batches, checkpointed=False) == gradients(vlm, batches)
    assert {name: tensor.data_ptr() for name, tensor in vlm.model.state_dict().items()} == before


def test_tokens_at_a_time_change_nothing(float32, monkeypatch):
    """The output head gets two answer tokens of each sample at a time, or all. Its own number of tokens shows it."""
    vlm, batches = float32("llava")
    calls: list[int] = []
    hook = vlm.model.lm_head.register_forward_hook(
        lambda _module, args, _output: calls.append(args[0].shape[:2].numel())
    )
    whole, most = gradients(vlm, batches), max(calls)
    calls.clear()
    monkeypatch.setattr(gradient_pass, "_LOGITS", 2 * vlm.model.lm_head.out_features)
    parts = gradients(vlm, batches)
    hook.remove()
    assert max(calls) == 2 < most and parts.loss == pytest.approx(whole.loss, rel=1e-6)
    for block, whole_block in zip(parts.blocks, whole.blocks, strict=True):
        for name, gradient in whole_block.items():
            assert block[name].square == pytest.approx(gradient.square, **NEAR)
            assert block[name].absolute == pytest.approx(gradient.absolute, **NEAR)


def test_memory_of_the_graph_is_bounded(float32, monkeypatch):
    """With checkpoints, fewer bytes are alive for the backward pass: those of inputs of blocks."""
    vlm, batches = float32("llava")
    alive: dict[bool, int] = {}
    for checkpointed in (True, False):
        sizes = {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            monkeypatch.setattr(torch.Tensor, "backward", lambda *_args: None)
            with pytest.raises(Exception, match="does not depend"):
                gradients(vlm, batches[:1], checkpointed=checkpointed)
            monkeypatch.undo()
        alive[checkpointed] = sum(sizes.values())
    assert alive[True] < alive[False] / 4


def test_finite_differences(float32):
    """A step in an output changes the loss by the gradient: the squares of all channels of one token, added up."""
    vlm, batches = float32("llava")
    vlm.model.double()
    batch, name, token, step, total = batches[2], decoder_blocks(vlm.model, vlm.spec)[0][0].linears[1], 3, 0.02, 0.0
    linear, labels = vlm.model.get_submodule(name), labels_of(batch)
    inputs = {key: value for key, value in batch.items() if key != "modality"}
    only = torch.where(
        torch.arange(batch["modality"].numel()) == token, 1, batch["modality"] * (batch["modality"] == 3)
    )
    for channel in range(linear.out_features):
        sides = []
        for by in (step, -step):

            def nudge(_module, _args, output, channel=channel, by=by):
                return output.index_put(
                    (torch.tensor(0), torch.tensor(token), torch.tensor(channel)), output.new_tensor(by), True
                )

            hook = linear.register_forward_hook(nudge)
            with torch.no_grad():
                logits = vlm.model(**inputs).logits[0, :-1]  # transformers' loss would compute in float32
                sides.append(torch.nn.functional.cross_entropy(logits, labels[0, 1:]).item())
            hook.remove()
        total += ((sides[0] - sides[1]) / (2 * step)) ** 2
    computed = gradients(vlm, [batch | {"modality": only}]).blocks[0][name]
    assert total > 0 and computed.square["text"] == pytest.approx(total / linear.out_features, rel=1e-2)


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_are_the_models(model, float32, monkeypatch):
    """Rotary embeddings get the positions that the model's own rule computes, three per token, and no plain counting."""
    vlm, batches = float32(model)
    batch, inner, captured = batches[0], vlm.model.base_model, []
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    expected, _ = inner.get_rope_index(**{key: batch[key] for key in keys})
    rotary = inner.language_model.rotary_emb
    hook = rotary.register_forward_pre_hook(
        lambda _m, args, kwargs: captured.append((args[1:], kwargs)), with_kwargs=True
    )
    gradients(vlm, [batch])
    hook.remove()
    ((args, kwargs),) = captured
    positions = args[0] if args else kwargs["position_ids"]
    assert torch.equal(positions[-3:].cpu(), expected)
    assert not torch.equal(expected[1], expected[2]) and len(set(expected[0, 0].tolist())) < expected.shape[-1]


def test_half_precision_does_not_underflow(float32):
    """Gradients of a tiny loss are the same in float16 up to its rounding, as the loss is scaled."""
    vlm, batches = float32("llava")
    expected = gradients(vlm, batches)
    vlm.model.half()
    computed = gradients(vlm, batches)
    assert computed.loss == pytest.approx(expected.loss, rel=1e-2)
    for ours, theirs in zip(computed.blocks, expected.blocks, strict=True):
        for name, gradient in theirs.items():
            assert ours[name].absolute["vision"] == pytest.approx(gradient.absolute["vision"], rel=0.05)


def test_no_answers(float32):
    vlm, batches = float32("llava")
    refused(lambda: gradients(vlm, batches[3:]), "no calibration sample has an answer", "add answers")


def test_gradients_survive_json(float32):
    vlm, batches = float32("llava")
    computed = gradients(vlm, batches)
    assert Gradients.from_dict(json.loads(json.dumps(computed.to_dict()))) == computed


def test_every_group_of_every_family_has_a_sensitivity(family, float32):
    """MBQ's weight for groups in attention and in the MLP alike."""
    vlm, batches = float32(family)
    blocks = decoder_blocks(vlm.model, vlm.spec)
    computed = gradients(vlm, batches)
    weights = sensitivities(computed, [{group.name: group.linears for group in groups} for groups in blocks])
    assert weights.keys() == {(group.layer, group.name) for groups in blocks for group in groups}
    assert all(group_weights.rho >= 0 for group_weights in weights.values())

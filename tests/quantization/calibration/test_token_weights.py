"""VLMQ's token weights: against a model copied and rounded block by block; the Gram matrix they make, against its formula."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.kit.pictures import picture
from vlmcompress.models import VLM, decoder_blocks, decoder_layers
from vlmcompress.models.data import Sample, encode
from vlmcompress.numerics import round_to_nearest
from vlmcompress.quantization import schemes as quantizers
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.calibration.token_weights import token_weights

pytestmark = pytest.mark.representatives

GPTQ = quantizers.REGISTRY.get("gptq")
METHOD = QuantMethod(GPTQ, GPTQ.Options(bits=3, group_size=64, tokens="vlmq"))


@pytest.fixture(scope="module")
def float32(loaded):
    """`float32(family)`: the tiny model in 32 bits, and encoded samples, one of text alone."""

    def get(family: str) -> tuple[VLM, list[dict[str, torch.Tensor]]]:
        base = loaded(family)
        vlm = VLM(copy.deepcopy(base.model).float(), base.processor, base.spec, base.path)
        samples = [Sample("a", (picture(80, 60),), "what is it", "red"), Sample("b", (), "two and two", "four")]
        return vlm, encode(samples, vlm)

    return get


def seen(vlm: VLM, batch: dict[str, torch.Tensor], path: str) -> tuple[torch.Tensor, dict]:
    """What a block gets: its input `[1, tokens, hidden]` and its keyword arguments."""
    by_name = {}

    def keep(_module, args, kwargs):
        by_name["x"], by_name["kwargs"] = args[0], kwargs

    hook = vlm.model.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        vlm.model(**{key: value for key, value in batch.items() if key != "modality"}, use_cache=False)
    hook.remove()
    return by_name["x"], by_name["kwargs"]


def attended(block: torch.nn.Module, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
    """`x + self_attn(norm(x))` of a block whose norms stand before attention."""
    names = ("attention_mask", "position_embeddings", "position_ids")
    return x + block.self_attn(block.input_layernorm(x), **{name: kwargs.get(name) for name in names})[0]


@pytest.mark.parametrize("model", ["llava", "qwen3_vl"])
def test_against_a_rounded_copy(model, float32):
    """The oracle rounds the blocks before in a copy of the model, takes their output, and differentiates by hand. In Qwen3-VL
    visual features are added between blocks."""
    vlm, batches = float32(model)
    blocks, paths = decoder_blocks(vlm.model, vlm.spec), decoder_layers(vlm.model, vlm.spec)
    before = {name: tensor.clone() for name, tensor in vlm.model.state_dict().items()}
    factors = token_weights(vlm, blocks, METHOD, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vlm.model.state_dict().items())
    rounded = VLM(copy.deepcopy(vlm.model), vlm.processor, vlm.spec, vlm.path)
    assert all(not any(layer == 0 for layer, _ in weights) for weights in factors), "behind nothing, U is F"
    for layer, path in enumerate(paths):
        expected: dict[str, list[torch.Tensor]] = {"qkv": [], "o": []}
        for batch in batches:
            plain, kwargs = seen(vlm, batch, path)
            behind, _ = seen(rounded, batch, path)
            block = vlm.model.get_submodule(path)
            expected["qkv"].append(by_hand(block, behind, plain, kwargs, "qkv"))
            expected["o"].append(by_hand(block, behind, plain, kwargs, "o"))
        for name, by_sample in expected.items():
            size = torch.cat(by_sample).square().mean().sqrt()
            for weights, theirs in zip(factors, by_sample, strict=True):
                if layer == 0:
                    assert size == 0
                else:
                    torch.testing.assert_close(weights[layer, name], theirs / size, rtol=1e-3, atol=1e-4)
        for group in blocks[layer]:
            for name in group.linears:
                weight = rounded.model.get_submodule(name).weight
                weight.data = round_to_nearest(
                    weight.data, METHOD.scheme.weights, scale_dtype=torch.float32
                ).dequantize(torch.float32)


def by_hand(block, behind, plain, kwargs, which: str) -> torch.Tensor:
    """Mean |dL/dZ| over the channels of q, k and v, or of o, `[tokens]`."""
    outputs: list[torch.Tensor] = []
    linears = [getattr(block.self_attn, f"{name}_proj") for name in which]
    target = attended(block, plain, kwargs).detach()
    hooks = [linear.register_forward_hook(lambda m, a, out: outputs.append(out)) for linear in linears]
    with torch.enable_grad():
        loss = (attended(block, behind.detach().requires_grad_(), kwargs) - target).square().sum()
    for hook in hooks:
        hook.remove()
    grads = torch.autograd.grad(loss, outputs)
    return torch.cat([grad[0].abs() for grad in grads], -1).mean(-1)


def test_every_family(family, float32):
    """All groups in attention behind the first block have weights with a mean square of 1, and no hook or weight stays."""
    vlm, batches = float32(family)
    blocks = decoder_blocks(vlm.model, vlm.spec)
    before = {name: tensor.clone() for name, tensor in vlm.model.state_dict().items()}
    factors = token_weights(vlm, blocks, METHOD, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vlm.model.state_dict().items())
    expected = {(g.layer, g.name) for groups in blocks[1:] for g in groups if ".self_attn." in g.linears[0]}
    assert expected
    for sample, batch in zip(factors, batches, strict=True):
        assert sample.keys() == expected
        assert all(weight.shape == (batch["modality"].numel(),) for weight in sample.values())
    for key in expected:
        together = torch.cat([sample[key] for sample in factors])
        assert together.square().mean().item() == pytest.approx(1) and (together >= 0).all()


def test_the_gram_matrix(float32):
    """`H = sum_t g_t^2 x_t x_t^T` of the tokens that count; the MLP's is as without weights."""
    vlm, batches = float32("llava")
    blocks, grams, inputs = decoder_blocks(vlm.model, vlm.spec), {}, {}
    generator = torch.Generator().manual_seed(0)
    weights = [{(1, "qkv"): torch.rand(batch["modality"].shape[1], generator=generator)} for batch in batches]

    def note(name):
        return lambda _module, args: inputs.setdefault(name, []).append(args[0][0].detach())

    hooks = [
        vlm.model.get_submodule(group.linears[0]).register_forward_pre_hook(note((group.layer, group.name)))
        for group in blocks[1]
    ]
    with torch.no_grad():
        for batch in batches:
            vlm.model(**{key: value for key, value in batch.items() if key != "modality"})
    for hook in hooks:
        hook.remove()
    spec = CaptureSpec(frozenset({"gram"}), token_weights=weights)
    for layer, captured in capture_blocks(vlm, blocks, batches, spec):
        grams.update({(layer, name): stats.gram().cpu() for name, stats in captured.stats.items()})
    for name in ("qkv", "gate_up"):
        expected = torch.zeros_like(grams[1, name])
        for x, batch, factors in zip(inputs[1, name], batches, weights, strict=True):
            for token in range(len(x)):
                if batch["modality"][0, token]:
                    g = factors[1, "qkv"][token] if name == "qkv" else 1.0
                    expected += g**2 * torch.outer(x[token], x[token])
        torch.testing.assert_close(grams[1, name], expected, rtol=1e-4, atol=1e-4)


def test_options():
    with pytest.raises(ValueError, match="balance must be 'off'"):
        GPTQ.Options(tokens="vlmq", balance="ratio")
    with pytest.raises(ValueError, match="tokens must be 'off' or 'vlmq', got 'all'"):
        GPTQ.Options(tokens="all")
    assert GPTQ.Options(tokens=False) == GPTQ.Options()

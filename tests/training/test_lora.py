"""Adapters against the product that defines them."""

from __future__ import annotations

import torch
from torch import nn

from vlmcompress.training import lora


def made(rank: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4, bias=False)).double()
    adapters = lora.create_adapters({"0": (5, 6), "2": (4, 5)}, rank, seed=1)
    return model, {name: tensor.double() for name, tensor in adapters.items()}


def test_new_adapters_change_nothing():
    model, adapters = made()
    x = torch.randn(7, 6).double()
    before = model(x)
    with lora.attached(model, adapters):
        assert torch.equal(model(x), before)


def test_merged_weights_compute_what_adapters_add():
    model, adapters = made()
    for name in lora.adapted_layers(adapters):
        adapters[f"{name}.lora_up"].normal_()
    x = torch.randn(7, 6).double()
    before = model(x)
    with lora.attached(model, adapters):
        adapted = model(x)
    assert torch.equal(model(x), before) and not torch.allclose(adapted, before)
    for name in lora.adapted_layers(adapters):
        layer = model.get_submodule(name)
        layer.weight.data = lora.merge_adapter(
            layer.weight.data, adapters[f"{name}.lora_down"], adapters[f"{name}.lora_up"]
        )
    assert torch.allclose(model(x), adapted, rtol=1e-12, atol=1e-12)


def test_a_merged_weight_is_rounded_once():
    weight, down, up = torch.randn(5, 6).bfloat16(), torch.randn(2, 6), torch.randn(5, 2)
    exact = weight.double() + 2 * up.double() @ down.double()
    assert torch.equal(lora.merge_adapter(weight, down, up), exact.float().bfloat16())


def test_gradients_reach_both_matrices():
    model, adapters = made()
    model.requires_grad_(False)
    for tensor in adapters.values():
        tensor.normal_().requires_grad_()
    with lora.attached(model, adapters):
        model(torch.randn(7, 6).double()).square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in adapters.values())


def test_a_rank_is_at_most_the_smaller_side():
    result = lora.create_adapters({"a": (2, 9)}, 8, seed=0)
    assert result["a.lora_down"].shape == (2, 9) and result["a.lora_up"].shape == (2, 2)
    again = lora.create_adapters({"a": (2, 9)}, 8, seed=0)
    assert torch.equal(result["a.lora_down"], again["a.lora_down"])

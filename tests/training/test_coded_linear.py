"""Layers of fixed codes: products and gradients are those of a weight that a loop makes of codes and scales."""

from __future__ import annotations

import pytest
import torch

from vlmcompress.numerics import ActFormat, Format, round_activations, round_to_nearest
from vlmcompress.training.coded_linear import Coded

FORMATS = [Format("int", 4, 16), Format("int", 4, 16, symmetric=False), Format("int", 8, -1), Format("int", 8, 0)]


def slow(q: torch.Tensor, zero: torch.Tensor | None, scale: torch.Tensor, group: int) -> torch.Tensor:
    """The weight, one number after the other, with a graph to the scales."""
    rows = []
    for i in range(q.shape[0]):
        row = []
        for j in range(q.shape[1]):
            at = (0,) if group == 0 else (i, 0 if group < 0 else j // group)
            row.append(scale[at] * (float(q[i, j]) - (0.0 if zero is None else float(zero[at]))))
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.bits}-{fmt.group}-{fmt.symmetric}")
def test_products_and_gradients(fmt):
    torch.manual_seed(0)
    weight = round_to_nearest(torch.randn(6, 32), fmt)
    bias, x, out = torch.randn(6), torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 6)
    layer = Coded(weight, bias, torch.float32)
    layer.weight_scale.requires_grad_()
    (layer(x) * out).sum().backward()
    scale, other = (tensor.detach().clone().requires_grad_() for tensor in (weight.scale, x))
    expected = other @ slow(weight.q, weight.zero_point, scale, fmt.group).T + bias
    (expected * out).sum().backward()
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.weight_scale.grad, scale.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(layer.weight, weight.dequantize(torch.float32))


def test_rounding_of_activations_is_the_identity_backward():
    torch.manual_seed(0)
    weight = round_to_nearest(torch.randn(4, 8), Format("int", 8, -1))
    layer = Coded(weight, None, torch.float32, ActFormat("int", 8, dynamic=True))
    x = torch.randn(3, 8, requires_grad=True)
    output = layer(x)
    torch.testing.assert_close(output, round_activations(x.detach(), layer.activations) @ layer.weight.T)
    output.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 8))


def test_only_scales_are_parameters():
    """Codes and zero points are none, so that no optimizer finds them; the scales have no gradient until it is asked for."""
    layer = Coded(round_to_nearest(torch.randn(4, 32), FORMATS[1]), None, torch.bfloat16)
    assert [name for name, _ in layer.named_parameters()] == ["weight_scale"]
    assert not layer(torch.randn(2, 32, dtype=torch.bfloat16)).requires_grad

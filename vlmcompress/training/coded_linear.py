"""Linear layers of fixed codes whose scales are trained: `y = x W^T` with `W = s (q - z)` for codes `q` and zero points `z`.

A scale is shared by a group of columns, so that its gradient is `dL/ds = sum_j dL/dW_j (q_j - z)` over these columns `j`, and
codes and zero points stay what they are (as in the last stage of EfficientQAT, arXiv 2407.11062). What is trained is `t` in
`s exp(t)`: a step of it is relative, whatever a layer's scales are, and no scale changes its sign. The weight is made for each
product and let go of, forward and backward, so that memory holds one at a time beside the codes, a byte each. Rounding of
activations is taken for the identity backward (a straight-through estimator).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.numerics import ActFormat, QTensor, dequantize, round_activations

SCALE = "weight_scale"
"""Name of the parameter of a layer's scales."""


class Coded(nn.Module):
    """A linear layer of integer codes, with scales as its parameter.

    Args:
        weight: `[out, in]`, of kind "int".
        bias: `[out]`, or None.
        dtype: the type in which the weight is multiplied.
        activations: what its input is rounded to; None: it is not.
        input_scale: of static activations.
    """

    codes: Tensor
    zero_point: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self,
        weight: QTensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        activations: ActFormat | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.format, self.dtype, self.activations = weight.format, dtype, activations
        self.weight_scale = nn.Parameter(weight.scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        for name, tensor in (("codes", weight.q), ("zero_point", weight.zero_point), ("input_scale", input_scale)):
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        """The weight `[out, in]`, made anew."""
        return QTensor(self.codes, self.weight_scale.detach(), self.zero_point, self.format).dequantize(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The product of the inputs `[..., in]`, rounded where the layer's scheme says so, with the weight."""
        if self.activations is not None:
            rounded = round_activations(x.detach().flatten(0, -2), self.activations, self.input_scale)
            x = x + (rounded.view_as(x).to(x.dtype) - x.detach())
        product: Tensor = _Product.apply(x, self.weight_scale, self)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """`x W^T`, with gradients to `x` and to the scales; the weight is made again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, layer: Coded) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.layer = layer
        return nn.functional.linear(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, scale), layer = ctx.saved_tensors, ctx.layer
        wide = torch.float32 if grad.device.type == "cpu" else grad.dtype  # some processors emulate 16-bit products
        wide_grad = grad.to(wide)
        inputs = (wide_grad @ layer.weight.to(wide)).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return inputs, None, None
        of_weight = (wide_grad.flatten(0, -2).T @ x.to(wide).flatten(0, -2)).float()
        steps = dequantize(layer.codes, torch.ones_like(scale, dtype=torch.float32), layer.zero_point, layer.format)
        return inputs, gathered(of_weight * steps, scale.shape).to(scale.dtype), None


def gathered(values: Tensor, shape: torch.Size) -> Tensor:
    """The sums of `values [out, in]` over what shares a scale; `shape`: `[out, groups]`, or `[1]` for one scale for all."""
    if len(shape) == 1:
        return values.sum().reshape(shape)
    return values.view(shape[0], shape[1], -1).sum(-1)

"""Products of 16-bit tensors in float32, on processors that would emulate them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from vlmcompress.models.devices import FloatProducts

PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (functional.linear, [(2, 5, 64), (48, 64), (48,)]),
    "few rows": (functional.linear, [(2, 2, 64), (48, 64), (48,)]),
    "patches": (torch.nn.functional.conv2d, [(2, 3, 8, 8), (16, 3, 4, 4)]),
    "patches of frames": (torch.nn.functional.conv3d, [(2, 3, 2, 8, 8), (16, 3, 2, 4, 4)]),
    "matmul": (torch.matmul, [(2, 4, 6, 64), (64, 7)]),
    "operator": (lambda x, y: x @ y, [(6, 64), (64, 7)]),
    "batches": (torch.bmm, [(2, 6, 64), (2, 64, 7)]),
    "attention": (functional.scaled_dot_product_attention, [(1, 2, 6, 16)] * 3),
}


class Computed(TorchDispatchMode):
    """The types in which operators but conversions are computed within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            self.types.update(arg.dtype for arg in args if isinstance(arg, Tensor))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_computed_in_float32_and_rounded_once(name: str) -> None:
    """Oracle: float64. Where few rows read a weight nothing is converted, as that costs more than it saves."""
    product, shapes = PRODUCTS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    with FloatProducts(torch.bfloat16), Computed() as computed:
        result = product(*inputs)
    assert computed.types == {torch.bfloat16 if name == "few rows" else torch.float32}
    exact = product(*(value.double() for value in inputs))
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-5)

"""Matrix products in float32 on a processor that has none in the model's 16-bit type.

A CPU without instructions for bfloat16 (most from before 2023) emulates its products, at a quarter of the speed of those in
float32. Both sum in float32 and round the result once, so that their numbers differ by the order of the sums alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_PRODUCTS = (functional.linear, functional.scaled_dot_product_attention)
_INSTRUCTIONS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}


class FloatProducts(TorchFunctionMode):
    """A context in which linear layers and attention compute in float32 what they are given in 16 bits, and return 16 bits.

    A weight is converted when it is used, so that memory holds one more copy of those that a graph keeps.
    """

    def __init__(self, dtype: torch.dtype, but: Tensor | None = None):
        """Args: `dtype`: the 16-bit type; `but`: a weight that is left as it is."""
        super().__init__()
        self.dtype, self.but = dtype, but

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or any(arg is self.but for arg in args if isinstance(arg, Tensor)):
            return func(*args, **kwargs)
        wide = {key: self._wide(value) for key, value in kwargs.items()}
        output = func(*map(self._wide, args), **wide)
        return output.to(args[0].dtype if args else kwargs["query"].dtype)

    def _wide(self, value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == self.dtype else value


def float_products(model: Any) -> contextlib.AbstractContextManager[Any]:
    """`FloatProducts` for a model, where that is the faster way; otherwise a context without effect.

    The output head, the largest weight, is left as it is: few tokens reach it.
    """
    return (
        FloatProducts(model.dtype, model.get_output_embeddings().weight)
        if emulated(model.dtype)
        else contextlib.nullcontext()
    )


def widened(module: nn.Module) -> Callable[..., Any]:
    """`module` as a function that computes in float32 throughout, where products in its own 16-bit type are emulated.

    Its weights are converted once, as they are now, and its inputs at each call; a tensor that it returns has the dtype of its
    first argument. Elsewhere the module itself. Hooks on its parts are called as ever.
    """
    if not emulated(next(module.parameters()).dtype):
        return module
    weights = {name: value.float() for name, value in module.state_dict(keep_vars=True).items()}

    def wide(value: Tensor) -> Tensor:
        return value.float() if value.is_floating_point() else value

    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        wide_inputs = tree_map_only(Tensor, wide, ((first, *args), kwargs))
        return tree_map_only(
            Tensor, lambda tensor: tensor.to(first.dtype), functional_call(module, weights, *wide_inputs)
        )

    return run


def emulated(dtype: torch.dtype) -> bool:
    """Whether models run on the CPU here, and it has no instructions for products of that type."""
    if torch.accelerator.is_available() or dtype not in _INSTRUCTIONS:
        return False
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return not any(has.get(name) for name in _INSTRUCTIONS[dtype])

"""Low-rank adapters: `W' = W + 2 B A` with `A [rank, in]`, `B [out, rank]` (LoRA, arXiv 2106.09685), and their merging.

`A` is random and `B` zero at first, so training starts from the unchanged model. Adapters are float32; during training they
add `2 (x A^T) B^T` to a layer's output, computed in the dtype of its input. Merging adds them to the weight, which is rounded
to its own dtype: bfloat16 loses small changes of large weights, so the result is measured after merging. Costs `rank (in +
out)` numbers per layer, with two more copies in the optimizer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

SCALE = 2.0
"""Factor of the product of the two matrices: LoRA's alpha divided by the rank."""
DOWN, UP = "lora_down", "lora_up"


def create_adapters(shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> dict[str, Tensor]:
    """Make adapters whose product is zero.

    Args:
        shapes: layer -> (outputs, inputs) of its weight.
        rank: rank of the adapters, limited to the smaller side of each weight.
        seed: seed of the random matrices.

    Returns:
        `LAYER.lora_down [rank, in]` and `LAYER.lora_up [out, rank]` of each layer, float32.
    """
    random = torch.Generator().manual_seed(seed)
    adapters: dict[str, Tensor] = {}
    for name, (rows, columns) in shapes.items():
        layer_rank = min(rank, rows, columns)
        adapters[f"{name}.{DOWN}"] = torch.randn(layer_rank, columns, generator=random) / columns**0.5
        adapters[f"{name}.{UP}"] = torch.zeros(rows, layer_rank)
    return adapters


def adapted_layers(adapters: Mapping[str, Tensor]) -> list[str]:
    """The layers that have an adapter, in their order."""
    return [name.removesuffix(f".{UP}") for name in adapters if name.endswith(f".{UP}")]


@contextlib.contextmanager
def attached(model: nn.Module, adapters: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context the layers of `model` compute with their adapters, and gradients reach the adapters."""
    with contextlib.ExitStack() as hooks:
        for name in adapted_layers(adapters):
            hook = functools.partial(_add, adapters[f"{name}.{DOWN}"], adapters[f"{name}.{UP}"])
            hooks.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        yield


def merge_adapter(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The weight `[out, in]` plus its adapter's product: computed in float32 or wider, rounded to the weight's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + SCALE * (up.to(wide) @ down.to(wide))).to(weight.dtype)


def _add(down: Tensor, up: Tensor, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Any:
    """Hook after a linear layer: add its adapter's output for the input `[..., in]`."""
    x = args[0]
    narrow = nn.functional.linear(x, down.to(x.dtype))
    return output + SCALE * nn.functional.linear(narrow, up.to(x.dtype))

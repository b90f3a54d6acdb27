"""Inputs and weights like those of a transformer: correlated features, a few large channels, a wide spread of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmcompress.statistics.balance import Sensitivity
from vlmcompress.statistics.inputs import NEEDS, GroupStats


def inputs(width: int, tokens: int = 512, seed: int = 0) -> Tensor:
    """`[tokens, width]` inputs of rank above `width / 2`, with channels up to about 20 times larger than the median."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) * torch.linspace(0.02, 1, width)[:, None]
    size = torch.exp(torch.randn(width, generator=generator))
    return torch.randn(tokens, width, generator=generator) @ mix / width**0.5 * size


def weight(rows: int, width: int, seed: int = 0) -> Tensor:
    """`[rows, width]`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return 0.05 * torch.randn(rows, width, generator=generator) * (0.5 + torch.rand(rows, 1, generator=generator))


def statistics(x: Tensor) -> GroupStats:
    """Everything about `x`, the second half of it called vision and the end of that answer."""
    stats = GroupStats(x.shape[1], NEEDS)
    mask = torch.ones(len(x), dtype=torch.uint8)
    mask[len(x) // 2 :] = 2
    mask[-len(x) // 8 :] = 3
    stats.update(x, mask)
    stats.sensitivity = Sensitivity({"text": 1.0, "vision": 0.5, "answer": 2.0}, rho=0.5)
    return stats


def output_error(x: Tensor, changed: Tensor, original: Tensor) -> float:
    """`||X (W' - W)^T||^2` in float64, from the activations themselves."""
    return (x.double() @ (changed.double() - original.double()).T).square().sum().item()

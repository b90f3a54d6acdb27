"""Inputs and weights like those of a transformer: correlated features, a few large channels, a wide spread of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmcompress.numerics import decode, find_params, round_to_codes
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import MODALITIES, STATISTICS, GroupStats

WIDTH = 128
COUNTS = {"text": 120, "vision": 360, "answer": 60}
MBQ = {"text": 0, "vision": 0.5, "answer": 1}  # its squared-error objective with rho = 0.5


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
    collector = Collector(x.shape[1], STATISTICS)
    mask = torch.ones(len(x), dtype=torch.uint8)
    mask[len(x) // 2 :] = 2
    mask[-len(x) // 8 :] = 3
    collector.add(x, mask)
    stats = collector.finish()
    stats.sensitivity = Sensitivity(rho=0.5)
    return stats


def output_error(x: Tensor, changed: Tensor, original: Tensor) -> float:
    """`||X (W' - W)^T||^2` in float64, from the activations themselves."""
    return (x.double() @ (changed.double() - original.double()).T).square().sum().item()


def tokens() -> dict[str, Tensor]:
    """Inputs of each modality, whose large channels differ."""
    return {name: inputs(WIDTH, count, seed) for seed, (name, count) in enumerate(COUNTS.items())}


def collected(parts: dict[str, Tensor], repeat: dict[str, int] | None = None) -> GroupStats:
    """Statistics of `parts`, each of which is seen `repeat` times."""
    collector = Collector(WIDTH, STATISTICS)
    for code, name in enumerate(MODALITIES, start=1):
        for _ in range(1 if repeat is None else repeat[name]):
            collector.add(parts[name], torch.full((len(parts[name]),), code))
    return collector.finish()


def losses(parts: dict[str, Tensor], new: Tensor, old: Tensor) -> dict[str, float]:
    """Mean squared output error of a token, by modality, from the activations."""
    return {name: output_error(x, new, old) / len(x) for name, x in parts.items()}


def slow_gptq(w, gram, fmt, damp, actorder):
    """Optimal brain quantization in float64 (arXiv 2208.11580, eq. 3): fix a column, spread its error over the columns
    not yet fixed by the inverse Hessian of those, shrink the problem by that column, repeat. No factor, no blocks."""
    h = gram.double().clone()
    h.diagonal().add_(damp * h.diagonal().mean())
    order = gram.diagonal().argsort(descending=True, stable=True) if actorder else torch.arange(len(h))
    scale, zero = find_params(w, fmt, scale_dtype=torch.bfloat16, importance=gram.diagonal())
    w, result = w.double().clone(), torch.empty_like(w, dtype=torch.float64)
    free = order.tolist()
    while free:
        i, rest = free[0], free[1:]
        g = i // fmt.group
        s, z = scale[:, g].double(), None if zero is None else zero[:, g].double()
        codes = round_to_codes(w[:, i].float(), scale[:, g].float(), None if zero is None else zero[:, g].float(), fmt)
        result[:, i] = decode(codes.double(), s, z)
        inverse = torch.linalg.inv(h[free][:, free])
        w[:, rest] -= torch.outer((w[:, i] - result[:, i]) / inverse[0, 0], inverse[0, 1:])
        free = rest
    return result

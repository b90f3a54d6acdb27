"""Inputs, weights and signals as trained models have them: decaying spectra, a few outlier channels, modalities that differ.

White noise would flatter every scheme and every reducer: its Gram matrix is the identity, and no token stands for another. Here
the singular values of inputs and weights fall as `1 / (1 + i)^0.7` onto a floor of noise, channels have log-normal gains, and
one channel in 512 is 20 times larger (as found in LLM.int8(), arXiv 2208.07339).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

RANK, FALL, FLOOR, OUTLIERS = 512, 0.7, 0.05, 512
SHARES = {1: 0.15, 2: 0.75, 3: 0.1}  # of text, vision and answer among the tokens
HEADS, LAYERS = 16, 8  # of the pretended encoder


def inputs(width: int, tokens: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs `[tokens, width]` of linear layers in bfloat16, and the modality `[tokens]` of each on the CPU."""
    draw = torch.Generator(device).manual_seed(seed)
    mask = torch.repeat_interleave(
        torch.tensor([*SHARES]), torch.tensor([round(share * tokens) for share in SHARES.values()])
    )[:tokens]
    mask = torch.cat([mask, mask.new_ones(tokens - len(mask))])
    x = spectrum(tokens, width, draw)
    x += torch.randn(4, width, device=device, generator=draw)[mask.to(device)] * 0.3  # each modality has its own mean
    gains = torch.randn(width, device=device, generator=draw).mul_(0.5).exp_()
    gains[torch.randperm(width, device=device, generator=draw)[: max(2, width // OUTLIERS)]] *= 20
    return (x * gains).bfloat16(), mask


def weight(rows: int, width: int, device: torch.device, seed: int = 0) -> Tensor:
    """A weight `[rows, width]` in bfloat16 whose rows differ in size."""
    draw = torch.Generator(device).manual_seed(10_000 + seed)
    sizes = torch.randn(rows, 1, device=device, generator=draw).mul_(0.3).exp_()
    return (spectrum(rows, width, draw) * sizes * width**-0.5).bfloat16()


def spectrum(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """A random matrix `[rows, columns]` of unit mean square whose singular values decay onto a floor."""
    place: dict[str, Any] = {"device": draw.device, "generator": draw}
    rank = min(RANK, rows, columns)
    sizes = (1 + torch.arange(rank, device=draw.device)) ** -FALL
    sizes /= sizes.norm()
    x = (torch.randn(rows, rank, **place) * sizes) @ torch.randn(rank, columns, **place)
    return x.add_(torch.randn(rows, columns, **place), alpha=FLOOR)


def statistics(x: Tensor, mask: Tensor, needs: Iterable[str]) -> Any:
    """Statistics of inputs on the device that they are on, with a sensitivity, as a gradient pass would give one.

    For the cross-Gram matrix the 16-bit model's inputs differ by a hundredth.
    """
    from vlmcompress.numerics.statistics.balance import Sensitivity
    from vlmcompress.numerics.statistics.collect import Collector
    from vlmcompress.numerics.statistics.inputs import SAMPLE
    from vlmcompress.numerics.statistics.tokens import splits

    (split,) = splits([mask[None]], [[0]], SAMPLE)
    collector = Collector(x.shape[1], needs)
    collector.add(x, split.to(x.device))
    stats = collector.finish()
    stats.sensitivity = Sensitivity(rho=0.5)
    return stats


def reducer(name: str, width: int) -> Any:
    """A reducer that keeps half of the tokens and runs on signals alone."""
    from vlmcompress.reduction.methods import REGISTRY, learned

    default = REGISTRY.get(name)
    network = learned.Network(learned.initial(torch.zeros(width), torch.ones(width), hidden=64, seed=0))
    chosen = {"keep": 0.5, "thresholds": (0.6,) * LAYERS, "network": network, "level": 0.6}
    fields = {field.name for field in dataclasses.fields(default)}
    return dataclasses.replace(default, **{key: value for key, value in chosen.items() if key in fields})


def signals(grid: tuple[int, int, int], width: int, device: torch.device, seed: int = 0) -> Any:
    """Signals of an image that has something for every reducer: tokens `[n, width]` in which neighbours are alike."""
    from vlmcompress.reduction.methods import Signals

    draw, n, head = torch.Generator(device).manual_seed(seed), math.prod(grid), max(4, min(80, width // HEADS))

    def rows(count: int, columns: int) -> Tensor:
        x = spectrum(count, columns, draw)
        return (x + 0.7 * x.roll(1, 0) + 0.7 * x.roll(grid[2], 0)).bfloat16()

    def spread() -> Tensor:
        return torch.randn(n, device=device, generator=draw).exp()

    return Signals(
        grid=grid,
        features=rows(n, width),
        keys=rows(n, HEADS * head),
        heads=HEADS,
        saliency=spread(),
        windowed=spread(),
        query=rows(12, width),
        query_keys=rows(12, HEADS * head),
    )


def reduced(reducer: Any, image: Any) -> Any:
    """The reduction of an image by a method; by one that merges in the encoder's layers, in `LAYERS` of these."""
    from vlmcompress.reduction import methods

    if not reducer.MERGES:
        return methods.reduce(reducer, image)
    merged = methods.Reduction.identity(image.n, image.device)
    for layer in range(LAYERS):
        left = {name: merged.apply(getattr(image, name)) for name in ("features", "keys", "saliency", "windowed")}
        now = dataclasses.replace(image, merged=merged, **left)
        merged = merged.then(methods.merge_layer(reducer, now, layer, LAYERS))
    return merged

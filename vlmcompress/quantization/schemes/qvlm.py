"""After Q-VLM (arXiv 2410.08119): ranges of weights searched by the output of neighbouring blocks, not layer by layer.

Errors of one block are undone or amplified by the next, so the best range of each layer alone is not the best of all. Searching
all blocks at once is too much; Q-VLM cuts the decoder into runs of at most `depth` blocks where the entropy of a block's input,
given that of the block before, says that they depend on each other (`partition`), and chooses the ranges of a run by

    || F_run(x; quantized) - F_run(x; float) ||^2

with the float run after a float prefix, the quantized one after quantized runs. `calibration.block_clip` does the search:
it needs the model. This module rounds to nearest in ranges that cover a percentile of the magnitudes of each row's group, the
same one for all layers that read one input; candidates are 1 to `lowest` in `grid` steps, the paper's 1.0, 0.995, ..., 0.98.

What is the paper's: runs by entropy, at most 3 deep, the objective, the candidates. What is not: it quantizes activations to 4
or 6 bits in fixed ranges and searches those, which no engine serves; here it is the ranges of weights, in formats that engines
have. It doesn't say how the ranges of a run are searched together; here one changes at a time, in turns, until none gets
better or after `sweeps` turns, from the full ranges on: no worse than rounding to nearest, and no guarantee of the optimum. Its
threshold for joining is a constant; the authors' code has the running mean of the entropies, here it is the mean of all. (Their
code searches each layer by its own error, too, and only estimates ranges anew where entropy is high.) It also fine-tunes the
vision tower, which here stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import Format, QTensor, Scheme, round_to_nearest, weight_only
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes._base import Needs, QuantizerOptions


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`bits`, `group_size`, `symmetric` as in rtn; `depth`: most blocks of a run; `grid`: candidates, from 1 down to the
    percentile `lowest`; `sweeps`: most turns over the layers of a run."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    depth: int = 3
    grid: int = 5
    lowest: float = 0.98
    sweeps: int = 3

    def __post_init__(self) -> None:
        scheme(self)
        for name, least in (("depth", 1), ("grid", 2), ("sweeps", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if isinstance(self.lowest, bool) or not isinstance(self.lowest, int | float) or not 0.5 <= self.lowest < 1:
            raise ValueError(f"lowest must be a number of at least 0.5 and below 1, got {self.lowest!r}")

    @property
    def percentile(self) -> float:
        """Share of magnitudes that the ranges cover: all, before the search."""
        return 1.0


@dataclass(frozen=True)
class Ranged(Options):
    """Options of a group whose ranges have been searched: they cover the `percentile` of magnitudes."""

    percentile: float = 1.0


def needs(options: Options) -> Needs:
    """The Gram matrix, by which errors are reported, and a search for ranges over runs of blocks."""
    return Needs(frozenset({"gram"}), searches=frozenset({"ranges"}))


def scheme(options: Options) -> Scheme:
    """Number formats: integer weights, 16-bit activations."""
    return weight_only(options.bits, options.group_size, options.symmetric)


def quantize(
    weight: Tensor, stats: GroupStats | None, options: Options, scale_dtype: torch.dtype, prepared: Any = None
) -> QTensor:
    """Round `weight [out, in]` to nearest in its ranges; full ones where none were searched."""
    fmt = scheme(options).weights
    ratio = cover(weight, fmt, options.percentile)
    return round_to_nearest(weight, fmt, scale_dtype=scale_dtype, ratio=ratio)


def percentiles(options: Options) -> list[float]:
    """The candidate percentiles, from the full range down."""
    return [1 - k * (1 - options.lowest) / (options.grid - 1) for k in range(options.grid)]


def cover(weight: Tensor, fmt: Format, percentile: float) -> Tensor:
    """The share of each piece's largest magnitude that covers the percentile of its magnitudes: `[out, n_groups]`.

    Between two magnitudes the percentile is interpolated linearly.
    """
    # A percentile near 1 lies among the few largest magnitudes, for which `topk` is enough: no sort of the whole weight.
    pieces = weight.float().abs().unflatten(1, (fmt.n_groups(weight.shape[1]), -1))  # [out, n_groups, group]
    place = (1 - percentile) * (pieces.shape[-1] - 1)  # counted from the largest
    below = math.floor(place)
    top = pieces.topk(min(below + 2, pieces.shape[-1]), -1).values
    value = torch.lerp(top[..., below], top[..., min(below + 1, top.shape[-1] - 1)], place - below)
    return torch.where(top[..., 0] > 0, value / top[..., 0].clamp_min(1e-30), 1.0)


def partition(entropies: Sequence[float], depth: int) -> list[list[int]]:
    """Cut blocks into runs of neighbours: one joins the block before while its entropy given that is at least the mean.

    Args:
        entropies: entropy of each block's input given that of the block before, in bits; the first is not looked at.
        depth: the most blocks in a run.
    """
    # High conditional entropy: the block's input is not settled by the one before, so ranges of both matter together.
    mean = sum(entropies[1:]) / max(1, len(entropies) - 1)
    runs: list[list[int]] = []
    for block, entropy in enumerate(entropies):
        if runs and entropy >= mean and len(runs[-1]) < depth:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs

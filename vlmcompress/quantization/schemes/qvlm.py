"""After Q-VLM (arXiv 2410.08119): clipping ranges of weights searched by the output of several adjacent blocks, not layer by
layer.

Later blocks reduce or amplify the errors of earlier ones, so the best range of each layer alone is not the best for all.
Searching all blocks at once is too expensive. Q-VLM cuts the decoder into runs of at most `depth` blocks that depend on each
other, judged by the conditional entropy of a block's input given that of the block before (`partition`), and chooses the
ranges of a run by

    || F_run(x; quantized) - F_run(x; float) ||^2

where the float run follows a float prefix and the quantized run follows quantized runs. `calibration.block_clip` does the
search, as it needs the model. This module rounds to nearest in ranges that cover a percentile of the magnitudes of each row's
group; all layers that read the same input share the percentile. Candidates are 1 to `lowest` in `grid` steps, the paper's 1.0,
0.995, ..., 0.98.

From the paper: runs by entropy, at most 3 blocks deep, the objective, and the candidates. Different: the paper quantizes
activations to 4 or 6 bits in fixed ranges and searches those ranges, which no engine serves; here the ranges of weights are
searched, in formats that engines support. The paper does not say how the ranges of a run are searched jointly; here one
changes at a time, in turns that begin with the full ranges and end when nothing improves or after `sweeps` turns: no worse
than rounding to nearest, but not necessarily the optimum. The paper's threshold for joining blocks is a constant, the authors'
code uses the running mean of the entropies, and here it is the mean of all. (Their code also searches each layer by its own
error, and re-estimates ranges only where the entropy is high.) The paper also fine-tunes the vision tower, which is not done
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import Format, QTensor, Scheme, round_to_nearest, weight_only
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`bits`, `group_size`, `symmetric` as in rtn; `depth`: most blocks in a run; `grid`: number of candidates, from 1 down to
    the percentile `lowest`; `sweeps`: most turns over the layers of a run."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    depth: int = 3
    grid: int = 5
    lowest: float = 0.98
    sweeps: int = 3

    def __post_init__(self) -> None:
        SCHEME.scheme(self)
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
    """Options of a group after the search: its ranges cover the `percentile` of magnitudes."""

    percentile: float = 1.0


def percentiles(options: Options) -> list[float]:
    """The candidate percentiles, from the full range down."""
    return [1 - k * (1 - options.lowest) / (options.grid - 1) for k in range(options.grid)]


def cover(weight: Tensor, fmt: Format, percentile: float) -> Tensor:
    """The percentile of each group's magnitudes as a share of its largest, `[out, n_groups]`; 1 for a group of zeros.

    The percentile is interpolated linearly between magnitudes.
    """
    # A percentile near 1 lies among the few largest magnitudes: `topk` is enough, without sorting the whole weight.
    pieces = weight.float().abs().unflatten(1, (fmt.n_groups(weight.shape[1]), -1))  # [out, n_groups, group]
    place = (1 - percentile) * (pieces.shape[-1] - 1)  # counted from the largest
    below = math.floor(place)
    top = pieces.topk(min(below + 2, pieces.shape[-1]), -1).values
    value = torch.lerp(top[..., below], top[..., min(below + 1, top.shape[-1] - 1)], place - below)
    return torch.where(top[..., 0] > 0, value / top[..., 0].clamp_min(1e-30), 1.0)


def partition(entropies: Sequence[float], depth: int) -> list[list[int]]:
    """Cut blocks into runs of adjacent ones: a block joins the run before it if its conditional entropy is at least the mean.

    Args:
        entropies: entropy of each block's input given that of the block before, in bits; the first is ignored.
        depth: the most blocks in a run.
    """
    # High conditional entropy: the block before does not determine this block's input, so their ranges are searched together.
    mean = sum(entropies[1:]) / max(1, len(entropies) - 1)
    runs: list[list[int]] = []
    for block, entropy in enumerate(entropies):
        if runs and entropy >= mean and len(runs[-1]) < depth:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


class Qvlm(Quantizer[Options]):
    """The scheme `qvlm`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options

    @override
    def needs(self, options: Options) -> Needs:
        """The Gram matrix, by which errors are reported, and a search for ranges over runs of blocks."""
        return Needs(frozenset({"gram"}), searches=frozenset({"ranges"}))

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: integer weights, 16-bit activations."""
        return weight_only(options.bits, options.group_size, options.symmetric)

    @override
    def quantize(
        self, weight: Tensor, stats: GroupStats | None, options: Options, scale_dtype: torch.dtype, prepared: Any = None
    ) -> QTensor:
        """Round `weight [out, in]` to nearest in the searched ranges, or in full ones before a search."""
        fmt = self.scheme(options).weights
        ratio = cover(weight, fmt, options.percentile)
        return round_to_nearest(weight, fmt, scale_dtype=scale_dtype, ratio=ratio)


SCHEME = Qvlm()

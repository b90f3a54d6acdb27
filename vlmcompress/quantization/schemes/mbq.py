"""After MBQ (arXiv 2412.19509): AWQ's search with the modalities weighted by the sensitivity of the loss to their errors.

Visual tokens are many, and the answer's loss is far less sensitive to an error in one of them than in a text token. MBQ
measures this with one backward pass of the answer's loss: g_m is the mean |dL/dY| of modality m at the output of a block's
attention or MLP, and `rho = max(r, median r)` with `r = g_vision / g_answer` and the median over blocks (`Sensitivity.rho`).
Scales depend on inputs alone,

    s = mean|X|^a, at least 1e-4, normalized by sqrt(max s * min s),      a = 0, 1/grid, ..., (grid - 1)/grid

with the mean over all tokens. The scale with the smallest error `D` is taken (see `objective`; K is a number of elements):

    mae     (sum_answer |D| + rho sum_vision |D|) / (K_answer + K_vision)
    gram    sum_answer D^2 / K_answer + rho sum_vision D^2 / K_vision

`mae` is as published: D is the error of the output of the layers' module (q/k/v: attention, gate/up: MLP, others: the layer
itself), which runs again for each candidate (`calibration.block_search`). `gram` is our variant: D is the error of each linear
layer's output, computed from Gram matrices without running the model again. As in the authors' code, prompt tokens count in
neither, except the last one, whose logits give the answer's first token (see `statistics.balance`). There is no clipping and
no error feedback.

With 16-bit activations weights have groups and zero points. With 8-bit ones, as published, weights are symmetric with one
scale per row, and a candidate's error includes rounding the layers' inputs token by token, which Gram matrices cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import ActFormat, Format, QTensor, Scheme, round_to_nearest, weight_only
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes import awq
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions, Smoothing


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`activations`: bits, 16 or 8; `bits`, `group_size`, `symmetric` of the weights as in rtn (by default 4, 128 and false; at
    8-bit activations 4 or 8 bits, -1 and true); `grid`: candidate scales; `objective`: "mae", as published, or "gram", which
    runs no block again."""

    bits: int = 4
    group_size: int | None = None
    symmetric: bool | None = None
    activations: int = 16
    grid: int = 20
    objective: str = "mae"
    balance: ClassVar[str] = "mbq"

    def __post_init__(self) -> None:
        if self.activations not in (8, 16):
            raise ValueError(f"activations must be 16 or 8 bits, got {self.activations!r}")
        wide = self.activations == 16
        for name, value in (("group_size", 128 if wide else -1), ("symmetric", not wide)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if not wide and (self.bits not in (4, 8) or self.group_size != -1 or not self.symmetric):
            raise ValueError("activations of 8 bits need 4 or 8 bits, group_size -1 and symmetric true")
        SCHEME.scheme(self)
        if type(self.grid) is not int or self.grid < 2:
            raise ValueError(f"grid must be a whole number of at least 2, got {self.grid!r}")
        if self.objective not in ("gram", "mae"):
            raise ValueError(f"objective must be 'gram' or 'mae', got {self.objective!r}")
        if self.objective == "gram" and not wide:
            raise ValueError("objective 'gram' cannot account for 8-bit activations; use mae")


def candidates(mean: Tensor, grid: int) -> list[Tensor]:
    """The scales `[in]` to try for inputs of mean magnitudes `mean [in]`; the first is 1."""
    scales = []
    for k in range(grid):
        s = mean.float().pow(k / grid).clamp(min=1e-4)
        scales.append(s / (s.max() * s.min()).sqrt())
    return scales


def loss(sums: Mapping[str, float], counts: Mapping[str, int], rho: float) -> float:
    """The published loss `mae` of a candidate.

    Args:
        sums: modality -> sum over its tokens and channels of |D|.
        counts: modality -> number of elements in the sum.
        rho: weight of the visual error.

    Raises:
        ValueError: there are neither visual nor answer tokens; one of the two is enough.
    """
    if not counts["answer"] + counts["vision"]:
        raise ValueError("the samples have neither visual nor answer tokens; add some with images or answers")
    # Mean absolute error, the authors' default; both sums are divided by the same count, so only rho weights the modalities.
    return (sums["answer"] + rho * sums["vision"]) / (counts["answer"] + counts["vision"])


class Mbq(Quantizer[Options]):
    """The scheme `mbq`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options

    @override
    def needs(self, options: Options) -> Needs:
        """The Gram matrix and mean magnitudes; with the objective "mae" also the published search by the block's output."""
        return Needs(frozenset({"gram", "absmean"}), block_scales=options.objective == "mae")

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: integer weights; 16-bit activations or 8-bit ones, scaled per token."""
        if options.activations == 8:
            return Scheme(Format("int", options.bits, -1), ActFormat("int", 8, dynamic=True))
        assert options.group_size is not None and options.symmetric is not None
        return weight_only(options.bits, options.group_size, options.symmetric)

    @override
    def smooth(
        self, weights: list[Tensor], stats: GroupStats, options: Options, scale_dtype: torch.dtype = torch.bfloat16
    ) -> Smoothing:
        """Find the best scale `[in]` for the weights `[out_i, in]` with objective `gram`; none if no scale beats 1."""
        # The scale 1 is always compared. The mean pools all tokens, as published; the loss weights them with G = G_answer /
        # n_answer + rho G_vision / n_vision up to a factor.
        _, *scales = candidates(stats.balanced("off").absmean(), options.grid)
        return Smoothing(
            awq.scale_of_least_error(weights, scales, stats.gram(), self.scheme(options).weights, scale_dtype)
        )

    @override
    def quantize(
        self, weight: Tensor, stats: GroupStats | None, options: Options, scale_dtype: torch.dtype, prepared: Any = None
    ) -> QTensor:
        """Round `weight [out, in]`, smoothed already, to nearest."""
        importance = None if stats is None else stats.importance()
        return round_to_nearest(weight, self.scheme(options).weights, scale_dtype=scale_dtype, importance=importance)


SCHEME = Mbq()

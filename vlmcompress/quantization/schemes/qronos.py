"""Qronos (arXiv 2505.11695): GPTQ that also corrects for the change of a layer's input by the quantized blocks before it.

After quantized blocks, a layer has inputs `X` where the 16-bit model has `X'`. GPTQ keeps `X Q^T` near `X W^T`; Qronos keeps
it near the 16-bit model's `X' W^T`. For a row w, with damping d relative to `H = X^T X` as in GPTQ, it minimizes

    |X' w - X q|^2 + d |w - q|^2

(the paper has X~ for X, and X for X') column by column. The first column is rounded as if the others stayed unchanged. Then,
and after each further column, the remaining columns are set to the least-squares solution for the columns rounded so far:

    q_1 = Q(t_1),  t_1 = argmin_p |X' w - p X_1 - sum_{j>1} w_j X_j|^2 + d (w_1 - p)^2
    q_i = Q(v_i),  v = argmin_v   |X' w - sum_{j<i} q_j X_j - sum_{j>=i} v_j X_j|^2 + d (...)        for i > 1

In the form of LDLQ (`schemes.gptq`): with the cross-Gram matrix `C = X^T (X' - X)` (`statistics.inputs`) the first
line is

    |(w* - q) R|^2 + const,   H + d = R R^T,   w* = w + w C^T (H + d)^-1

so from the second column on Qronos *is* GPTQ on `w*`, as both take the best continuation of a fixed prefix. Only the first
column differs: `t_1 = w_1 + (w C^T)_1 / (H_11 + d)` instead of `w*_1`. GPTQ on `w' = w* + (t_1 - w*_1) u` gives both, where `u
= R_11 e_1 R^-1` is the change of the best continuation per change of the first column: `(w' - w*) R` is zero except in its
first entry. So everything in GPTQ (ranges, order of columns, blocks) applies here with w' instead of w, and so do its further
steps: clipped ranges, local search (least squares around w', which is near w*) and, with `behind: blocks`, channel scales.

`correct` goes only a share of the way from w to w'; 0 is GPTQ with the inputs of the quantized model. `behind: groups`
quantizes the groups of a block one after another, each with inputs after the groups before it, as in the paper; with `blocks`
the inputs of all groups are captured before any of the block is quantized.

Costs: one more matrix `[in, in]` per modality, a second stream of hidden states, more runs of each block, and twice `out *
in^2` per layer. Loses: w' is fitted to the calibration tokens with as many free numbers as there are weights, so it needs
more tokens and damping than GPTQ. The reported errors of a layer are those of `X (Q - W)^T`, which are intentionally
larger than GPTQ's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmcompress.numerics import QTensor
from vlmcompress.numerics.statistics.inputs import CROSS, GroupStats
from vlmcompress.quantization.schemes import gptq
from vlmcompress.quantization.schemes._base import Needs
from vlmcompress.quantization.schemes._columns import Feedback


@dataclass(frozen=True)
class Options(gptq.Options):
    """The options of gptq; `correct`: share of the correction, from 0 (GPTQ's weights) to 1 (the paper); `behind`: "groups" or
    "blocks", what has been quantized when a group's input is observed."""

    correct: float = 1.0
    behind: str = "groups"

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.correct, int | float) and not isinstance(self.correct, bool)
        if not number or not 0 <= self.correct <= 1:
            raise ValueError(f"correct must be a number from 0 to 1, got {self.correct!r}")
        if self.behind not in ("groups", "blocks"):
            raise ValueError(f"behind must be 'groups' or 'blocks', got {self.behind!r}")
        if self.smooth != "off" and self.behind == "groups":
            raise ValueError("smooth changes layers that behind 'groups' has already quantized; use behind 'blocks'")


@dataclass(frozen=True)
class Prepared:
    """`feedback`: error feedback of the group's input; `cross [in, in]`: its cross-Gram matrix, None without correction."""

    feedback: Feedback
    cross: Tensor | None

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """Defects of the Gram matrix, with details."""
        return self.feedback.warnings


scheme, smooth = gptq.scheme, gptq.smooth


def needs(options: Options) -> Needs:
    """What gptq requires, and for a correction the cross-Gram matrix, with the prefix that `behind` names."""
    inherited = gptq.needs(options)
    cross = {CROSS} if options.correct else set()
    return replace(
        inherited, statistics=inherited.statistics | cross, prefix="groups" if options.behind == "groups" else "blocks"
    )


def prepare(
    weights: list[Tensor], stats: GroupStats, options: Options, factorization: gptq.Factorization | None = None
) -> Prepared:
    """Factorize the Gram matrix of the group's input, and compute its weighted cross-Gram matrix."""
    cross = stats.cross() if options.correct else None
    return Prepared(gptq.prepare(weights, stats, options, factorization), cross)


def quantize(
    weight: Tensor, stats: GroupStats, options: Options, scale_dtype: torch.dtype, prepared: Prepared | None = None
) -> QTensor:
    """Round `weight [out, in]` column by column, towards the 16-bit model's output."""
    return quantize_group([weight], stats, options, scale_dtype, prepared)[0]


def quantize_group(
    weights: list[Tensor],
    stats: GroupStats,
    options: Options,
    scale_dtype: torch.dtype,
    prepared: Prepared | None = None,
) -> list[QTensor]:
    """Round weights `[out_i, in]` in one pass over their columns. Raises ValueError without a cross-Gram matrix."""
    ready = prepare(weights, stats, options) if prepared is None else prepared
    if ready.cross is not None:
        together = torch.cat([weight.float() for weight in weights])
        moved = corrected(together, ready.cross, ready.feedback, options.correct)
        weights = list(moved.split([len(weight) for weight in weights]))
    return gptq.quantize_group(weights, stats, options, scale_dtype, ready.feedback)


def corrected(weight: Tensor, cross: Tensor, feedback: Feedback, share: float = 1.0) -> Tensor:
    """The weights `w' [out, in]`, float32, for which GPTQ gives Qronos' result.

    Args:
        weight: `[out, in]` float32.
        cross: `X^T (X' - X)`, `[in, in]`.
        feedback: the factor of the damped `X^T X`.
        share: how far to go from `weight` to w', 0 to 1.
    """
    order, matrix, pivots = feedback.order, feedback.matrix, feedback.pivots[:, None]
    pull = (cross @ weight.T)[order]  # [in, out], in rounding order: (w C^T)^T
    # w* - w = w C^T (R R^T)^-1. `matrix` is M = diag(1 / R_ii) R^T, unit lower triangular, so R R^T = M^T diag(R_ii^2) M: two
    # triangular systems and a division instead of an inverse.
    move = torch.linalg.solve_triangular(matrix.T, pull, upper=True, unitriangular=True).div_(pivots.square())
    move = torch.linalg.solve_triangular(matrix, move, upper=False, unitriangular=True)  # (w* - w)^T
    unit = torch.zeros_like(pivots)
    unit[0] = 1
    follow = torch.linalg.solve_triangular(matrix, unit, upper=False, unitriangular=True)  # u^T
    size = (matrix[1:, 0] * feedback.pivots[1:]).square().sum() + feedback.pivots[0] ** 2  # H_11 + d
    first = pull[0] / size  # t_1 - w_1, the least squares of the first column alone
    # Only the first entry of (w' - w*) R differs from zero, so GPTQ's corrections of later columns give Qronos' own.
    move += follow * (first - move[0])
    targets = weight.clone()
    targets[:, order] += share * move.T
    return targets

"""Qronos (arXiv 2505.11695): GPTQ that also corrects for what the quantized blocks before do to a layer's input.

After quantized blocks a layer is given inputs `X` where the 16-bit model has `X'`. GPTQ keeps `X Q^T` near `X W^T`;
Qronos keeps it near the 16-bit model's `X' W^T`. For a row w, with damping d relative to `H = X^T X` as in GPTQ, it
minimizes

    |X' w - X q|^2 + d |w - q|^2

(the paper has X~ for X, and X for X') column by column. The first is rounded as if the others stayed as they are.
Then, and after each column that is fixed, those still to come become the least-squares continuation of what is fixed:

    q_1 = Q(t_1),  t_1 = argmin_p |X' w - p X_1 - sum_{j>1} w_j X_j|^2 + d (w_1 - p)^2
    q_i = Q(v_i),  v = argmin_v   |X' w - sum_{j<i} q_j X_j - sum_{j>=i} v_j X_j|^2 + d (...)        for i > 1

In the form of LDLQ (`schemes.gptq`): with the cross-Gram matrix `C = X^T (X' - X)` (`statistics.inputs`) the first
line is

    |(w* - q) R|^2 + const,   H + d = R R^T,   w* = w + w C^T (H + d)^-1

so from the second column on Qronos *is* GPTQ on `w*`, as both take the best continuation of a fixed prefix. The first
alone differs, by `t_1 = w_1 + (w C^T)_1 / (H_11 + d)` instead of `w*_1`. Both are had by GPTQ on `w' = w* + (t_1 -
w*_1) u`, where `u = R_11 e_1 R^-1` is how the best continuation follows the first column: `(w' - w*) R` is zero but
for its first entry. So all that GPTQ has (ranges, order of columns, blocks) serves here, on w' in the place of w,
and so do its further steps: clipped ranges, local search (by least squares about w', which is near w*) and, with
`behind: blocks`, scales of channels.

`correct` takes a share of the way from w to w'; at 0 it is GPTQ after what is quantized. `behind: groups` quantizes
the groups of a block one after another, each after those before it, as the paper does; `blocks` sees a block before
any of it is quantized.

Costs: a matrix `[in, in]` more for each modality, a second stream of hidden states, further runs of each block, and
for each layer `out * in^2` twice. Loses: w' is fitted to the calibration tokens with as many free numbers as the
weights, so it wants more tokens and damping than GPTQ. The errors reported for a layer are of `X (Q - W)^T`: larger
than GPTQ's, on purpose.
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
    """Those of gptq; `correct`: share of the correction that is made, from 0 (GPTQ's weights) to 1 (the paper); `behind`:
    "groups" or "blocks", what is quantized already where a group's input is observed."""

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
            raise ValueError(
                "smooth puts scales into layers that behind 'groups' has quantized by then; use behind 'blocks'"
            )


@dataclass(frozen=True)
class Prepared:
    """`feedback`: of the group's input; `cross [in, in]`: its cross-Gram matrix, None where nothing is corrected."""

    feedback: Feedback
    cross: Tensor | None

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """Defects of the Gram matrix, with details."""
        return self.feedback.warnings


scheme, smooth = gptq.scheme, gptq.smooth


def needs(options: Options) -> Needs:
    """What gptq requires; for a correction the cross-Gram matrix, captured after what `behind` says."""
    inherited = gptq.needs(options)
    cross = {CROSS} if options.correct else set()
    return replace(
        inherited, statistics=inherited.statistics | cross, prefix="groups" if options.behind == "groups" else "blocks"
    )


def prepare(weights: list[Tensor], stats: GroupStats, options: Options, factor: gptq.Factor | None = None) -> Prepared:
    """Factorize the Gram matrix of the group's input, and weigh its cross-Gram matrix."""
    cross = stats.cross() if options.correct else None
    return Prepared(gptq.prepare(weights, stats, options, factor), cross)


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
    """Round weights `[out_i, in]` in one visit of their columns. Raises ValueError without a cross-Gram matrix."""
    ready = prepare(weights, stats, options) if prepared is None else prepared
    if ready.cross is not None:
        together = torch.cat([weight.float() for weight in weights])
        moved = corrected(together, ready.cross, ready.feedback, options.correct)
        weights = list(moved.split([len(weight) for weight in weights]))
    return gptq.quantize_group(weights, stats, options, scale_dtype, ready.feedback)


def corrected(weight: Tensor, cross: Tensor, feedback: Feedback, share: float = 1.0) -> Tensor:
    """The weights `w' [out, in]`, float32, that GPTQ makes Qronos of.

    Args:
        weight: `[out, in]` float32.
        cross: `X^T (X' - X)`, `[in, in]`.
        feedback: the factor of the damped `X^T X`.
        share: of the way from `weight` to w'.
    """
    order, matrix, pivots = feedback.order, feedback.matrix, feedback.pivots[:, None]
    pull = (cross @ weight.T)[order]  # [in, out], in the order of visits: (w C^T)^T
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

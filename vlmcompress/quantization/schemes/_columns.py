"""Round the columns of weights one after another and correct the remaining ones after each: the core of GPTQ.

`gptq` describes the algorithm. Here the sums over earlier errors are matrix products: large ones for distant columns, then one
per block and per strip; only within a strip (on a GPU within a block: `_triton_kernels`) are they computed column by column.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmcompress.numerics import Format, QTensor, remainder, round_to_codes
from vlmcompress.quantization.schemes._fused import kernels
from vlmcompress.quantization.schemes._local_search import search

_FAR = 512  # columns corrected at a time for the errors of all earlier columns; larger products are faster
_STRIP = 16  # columns within which errors are fed back one by one
_ROWS = 2560  # most rows to round at a time on a CPU
_ALIGNED = 64  # the number of rows is a multiple of this


@dataclass(frozen=True)
class Feedback:
    """Error feedback of a group.

    Attributes:
        order: `[in]`, the order in which columns are rounded.
        matrix: `[in, in]` with `R_ji / R_ii` at row i, column j < i; the rest is not read.
        residual_weight: `[in]`, `R_ii^2`: weight of column i's rounding error after optimal compensation by later columns.
        pivots: `[in]`, `R_ii` in the order of `order`.
        warnings: defects of the Gram matrix, with details.
    """

    order: Tensor
    matrix: Tensor
    residual_weight: Tensor
    pivots: Tensor
    warnings: tuple[tuple[str, str], ...] = ()

    def rescaled(self, s: Tensor) -> Feedback:
        """The feedback for inputs divided by `s [in]`, in the same order; modifies and reuses `matrix`."""
        visited = s[self.order]
        matrix = self.matrix.mul_(visited[:, None]).div_(visited)
        return replace(
            self, matrix=matrix, residual_weight=self.residual_weight / s.square(), pivots=self.pivots / visited
        )


def quantize_columns(
    weights: Sequence[Tensor],
    feedback: Feedback,
    params: Sequence[tuple[Tensor, Tensor | None]],
    fmt: Format,
    block: int = 256,
    sweeps: int = 0,
    global_scale: Tensor | None = None,
) -> list[QTensor]:
    """Round weights `[out_i, in]` column by column, with `feedback` of their group's input.

    Args:
        params: scale and zero point of each weight, from `numerics.find_params`.
        block: columns that are rounded, and searched, together.
        sweeps: sweeps of local search.
        global_scale: the weights' global scale, for NVFP4.
    """
    scales = torch.cat([scale for scale, _ in params]).float()
    zeros = None if fmt.symmetric else torch.cat([zero for _, zero in params if zero is not None]).float()
    q = torch.empty(len(scales), len(feedback.order), dtype=fmt.dtype, device=scales.device)
    # Rows are independent: H is the same for all. On a CPU, allocating large temporaries costs as much as the arithmetic.
    parts = math.ceil(len(q) / _ROWS) if q.device.type == "cpu" else 1
    step = max(1, math.ceil(len(q) / max(1, parts) / _ALIGNED) * _ALIGNED)
    starts = list(itertools.accumulate((len(w) for w in weights), initial=0))
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        some = [w[max(0, first - a) : max(0, first + step - a)] for w, a in zip(weights, starts, strict=False)]
        s = scales[rows].T.contiguous()  # [n_groups, rows]
        z = None if zeros is None else zeros[rows].T.contiguous()
        q[rows] = _quantize_columns([part for part in some if len(part)], feedback, s, z, fmt, block, sweeps)
    codes = q.split([len(w) for w in weights])
    return [QTensor.of(c, scale, zero, fmt, global_scale) for c, (scale, zero) in zip(codes, params, strict=True)]


def _quantize_columns(
    weights: Sequence[Tensor],
    feedback: Feedback,
    scales: Tensor,
    zeros: Tensor | None,
    fmt: Format,
    block: int,
    sweeps: int = 0,
) -> Tensor:
    """Codes `[out, in]` of all `weights [out_i, in]`; `scales` and `zeros` are `[n_groups, out]`.

    Works on the transpose, where columns are contiguous.
    """
    order, matrix = feedback.order, feedback.matrix
    # [in, out], float32 or wider, in rounding order; each row is overwritten by the errors of its column once that is rounded.
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    rows = torch.empty(len(order), sum(map(len, weights)), dtype=dtype, device=order.device)
    for some, target in zip(order.split(block), rows.split(block), strict=True):
        for weight, part in zip(weights, target.split([len(w) for w in weights], 1), strict=True):
            part.copy_(weight.index_select(1, some).T)
    codes = torch.empty_like(rows, dtype=fmt.dtype)
    # A column keeps the scale of its original group in any order: the engine needs no index.
    groups = (order // (len(rows) if fmt.group < 0 else fmt.group)).int()
    fused = kernels(rows.device, fmt)
    visit = fused.visit if fused else _visit
    # GPTQ's lazy batch updates (step 2, Eq. 4), reversed: a block is corrected for all earlier columns before it is rounded,
    # instead of correcting all later columns after each block. In q_i = Q(w_i + sum_{j<i} (w_j - q_j) R_ji / R_ii) the sum
    # over distant columns is one large product,
    for first, end in _spans(0, len(rows), max(_FAR, block)):
        targets = rows[first:end].addmm(matrix[first:end, :first], rows[:first])
        for a, b in _spans(first, end, block):  # the sum over nearer columns is one product per block,
            block_targets = targets[a - first : b - first].addmm_(matrix[a:b, first:a], rows[first:a])
            q = torch.empty_like(block_targets)
            # and the sum within the block is computed column by column.
            visit(block_targets, rows[a:b], q, matrix[a:b, a:b], scales, zeros, groups[a:b], fmt)
            if sweeps:
                steps = scales.index_select(0, groups[a:b])
                z = remainder(block_targets, q, steps, None if zeros is None else zeros.index_select(0, groups[a:b]))
                search(q, rows[a:b], z, matrix[a:b, a:b], feedback.pivots[a:b], steps, fmt, sweeps)
            codes[a:b] = q
    return codes.index_select(0, order.argsort()).T.contiguous()


def _visit(
    targets: Tensor,
    rows: Tensor,
    codes: Tensor,
    matrix: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor,
    fmt: Format,
) -> None:
    """Round a block of columns one after another.

    Args:
        targets: `[columns, out]`, values to round, corrected for columns before the block; corrections within it are added
            here.
        rows: `[columns, out]`, the weights; overwritten by their errors.
        codes: `[columns, out]`, float32, overwritten by the codes.
        matrix: `[columns, columns]`, the block's part of `Feedback.matrix`.
        scales, zeros: `[n_groups, out]`; `groups`: `[columns]`, int32, the group of each column.
    """
    s = scales.unbind()
    z = [None] * len(s) if zeros is None else zeros.unbind()
    places = groups.tolist()  # synchronizes with the device once per block
    for c, d in _spans(0, len(rows), _STRIP):
        strip, columns = targets[c:d].addmm_(matrix[c:d, :c], rows[:c]), rows[c:d]
        earlier, errors = matrix[c:d, c:d].tril(-1), columns.T  # 0 for columns whose errors are not known yet
        for g, target, row, code, factors in zip(
            places[c:d], strip.unbind(), columns.unbind(), codes[c:d].unbind(), earlier.unbind(), strict=True
        ):
            round_to_codes(target.addmv_(errors, factors), s[g], z[g], fmt, out=code)  # q_i
            remainder(row, code, s[g], z[g], out=row)  # w_i - q_i, with the original weight, not the corrected one


def _spans(first: int, end: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, end)) for a in range(first, end, step)]


def propagated_error(residual: Tensor, feedback: Feedback) -> Tensor:
    """Estimate GPTQ's error `[out, in]` from the residual of rounding to nearest; see `gptq.sketch`."""
    # d_i + sum_{j<i} d_j R_ji / R_ii = r_i for all rows at once: a unit lower triangular system [in, in] x [in, out].
    fed = torch.linalg.solve_triangular(feedback.matrix, residual[:, feedback.order].T, upper=False, unitriangular=True)
    error = torch.empty_like(residual)
    error[:, feedback.order] = fed.T
    return error

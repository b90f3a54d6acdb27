"""Local search among the codes of a block of columns, while the columns after it are still free.

GPTQ fixes a column before it knows what later ones round to. When a block of columns is rounded, some of its codes can be
changed for the better. Columns after the block will make up for its errors as well as they can, so what counts is the part
of the output error that they can't reach (`gptq`), with the errors `d = w - q` of the block and of all columns before it

    f = sum over the block's columns i of (R_ii z_i)^2,      z_i = d_i + sum_{j<i} d_j R_ji / R_ii

If the error of column j changes by c, then with `L_ij = R_ji / R_ii` (1 for j = i), half the slopes `p = L^T diag(R_ii^2) z`
and the curvature `K = L^T diag(R_ii^2) L`

    f changes by  2 c p_j + c^2 K_jj    and p by  c K_j,      so the best code of column j is the nearest to  q_j + p_j / K_jj

while all others stay. A *sweep* goes through the block in strips; of each strip every row changes the one code that lowers f
most. No step raises f.

QuantEase (arXiv 2309.01885) and CDQuant (2406.17542) descend so on the whole output error when all columns are rounded. Nothing
makes up for a change then, and the slopes cost `out * in^2` multiply-adds; on the layers of demo-smol that took 3.6 times as
long for the same error. Cost: `2 * columns` multiply-adds for each weight, and `columns` for each sweep. Loses: it ends where
no single code can improve, and fits the calibration tokens closer than feedback alone does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmcompress.numerics import Format, to_codes
from vlmcompress.quantization.schemes._fused import kernels

STRIP = 16  # columns of which each row changes one code at a time
_TIE = 1e-6  # what a change counts for less than the same one a column earlier: of equal ones the first is made


def search(
    codes: Tensor,
    errors: Tensor,
    z: Tensor,
    matrix: Tensor,
    pivots: Tensor,
    steps: Tensor,
    fmt: Format,
    sweeps: int,
) -> None:
    """Change codes of a block of columns for the better.

    Args:
        codes: `[columns, out]` float32, changed in place; so are their `errors [columns, out]`.
        z: `[columns, out]`, what the codes were rounded from less their values. What they were rounded from has the errors of
            all columns before in it, so this is the z of the module.
        matrix: `[columns, columns]` and `pivots [columns]`, the block's part of `_columns.Feedback`.
        steps: `[columns, out]`, the scale of each code.
        sweeps: how many times to go through the block.
    """
    # L, unit lower triangular, of the block; upper = L^T diag(R_ii^2); slopes p = upper z and curvature K = upper L.
    lower = matrix.tril(-1)
    lower.diagonal().fill_(1)
    upper = lower.T * pivots.square()
    fused = kernels(codes.device, fmt)
    change = fused.descend if fused and len(codes) <= fused.SEARCHED else descend
    change(codes, errors, upper @ z, upper @ lower, steps, fmt, sweeps, STRIP, _TIE)


def descend(
    codes: Tensor,
    errors: Tensor,
    slopes: Tensor,
    curvature: Tensor,
    steps: Tensor,
    fmt: Format,
    sweeps: int,
    width: int,
    tie: float,
) -> None:
    """Do the sweeps of `search` by strips of `width` columns.

    Args:
        slopes: half the slopes `[columns, out]`, which follow the changes.
        tie: what a change counts for less than the same one a column earlier.
    """
    diagonal = curvature.diagonal()[:, None]
    halves = diagonal * (0.5 + tie * torch.arange(len(codes), device=codes.device)[:, None])
    rates = (diagonal * steps).reciprocal_()
    strips = [*range(0, len(codes), width)]
    for number, a in enumerate(strips * sweeps):
        strip, after = slice(a, a + width), slice(0 if number < len(strips) * (sweeps - 1) else a, None)
        # q_j + p_j / K_jj is where f is least; p is in units of weights, codes are in steps. Rounded and clamped it is a code.
        change = codes[strip] - to_codes(torch.addcmul(codes[strip], slopes[strip], rates[strip]), fmt)
        c = change * steps[strip]
        gain = torch.addcmul(slopes[strip], c, halves[strip]).mul_(c)  # half of how f changes: the least is the best
        # One code of each row of the strip, and none where nothing gains: changes of two columns are not independent.
        best = gain.le_(gain.amin(0).clamp_(max=-torch.finfo(gain.dtype).tiny))
        codes[strip].addcmul_(change, best, value=-1)
        errors[strip].add_(c.mul_(best))
        # In the last sweep the slopes of columns that come no more are left as they are.
        slopes[after].addmm_(curvature[after, strip], c)

"""Local search among the codes of a block of columns, while the columns after it are still free.

GPTQ fixes a column before later ones are rounded, so after a block of columns is rounded, changing some of its codes can lower
the error. Columns after the block compensate for its errors as well as they can, so what counts is the part of the output
error that they cannot compensate (`gptq`), with the errors `d = w - q` of the block and of all columns before it

    f = sum over the block's columns i of (R_ii z_i)^2,      z_i = d_i + sum_{j<i} d_j R_ji / R_ii

If the error of column j changes by c, then with `L_ij = R_ji / R_ii` (1 for j = i), half the slopes `p = L^T diag(R_ii^2) z`
and the curvature `K = L^T diag(R_ii^2) L`

    f changes by  2 c p_j + c^2 K_jj    and p by  c K_j,      so the best code of column j is the nearest to  q_j + p_j / K_jj

while all others stay. A *sweep* goes through the block in strips; in each strip every row changes the one code that lowers f
most. No step raises f.

QuantEase (arXiv 2309.01885) and CDQuant (2406.17542) use the same coordinate descent on the whole output error, after all
columns are rounded. Nothing compensates for a change then, and the slopes cost `out * in^2` multiply-adds; on the layers of
demo-smol that took 3.6 times as long for the same error. Cost: `2 * columns` multiply-adds per weight, and `columns` more per
sweep. Loses: it stops where no single change improves f, and fits the calibration tokens more closely than feedback alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmcompress.numerics import Format, to_codes
from vlmcompress.quantization.schemes._fused import kernels

STRIP = 16  # columns of which each row changes one code at a time
_TIE = 1e-6  # penalty per column on a change, so that among equal changes the first column's is made


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
    """Improve the codes of a block of columns.

    Args:
        codes: `[columns, out]` float32, changed in place; so are their `errors [columns, out]`.
        z: `[columns, out]`, the values that were rounded minus the values of their codes. The former include the errors of all
            columns before, so this is z in the module's docstring.
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
        slopes: half the slopes `[columns, out]`, updated after each change.
        tie: penalty per column on a change, which decides between equal ones.
    """
    diagonal = curvature.diagonal()[:, None]
    halves = diagonal * (0.5 + tie * torch.arange(len(codes), device=codes.device)[:, None])
    rates = (diagonal * steps).reciprocal_()
    strips = [*range(0, len(codes), width)]
    for number, a in enumerate(strips * sweeps):
        strip, after = slice(a, a + width), slice(0 if number < len(strips) * (sweeps - 1) else a, None)
        # f is minimal at q_j + p_j / K_jj; p is in units of weights, codes in steps. Rounded and clamped it is a code.
        change = codes[strip] - to_codes(torch.addcmul(codes[strip], slopes[strip], rates[strip]), fmt)
        c = change * steps[strip]
        gain = torch.addcmul(slopes[strip], c, halves[strip]).mul_(c)  # half the change of f: the smallest is the best
        # At most one change per row and strip, as changes of two columns are not independent; none where none lowers f.
        best = gain.le_(gain.amin(0).clamp_(max=-torch.finfo(gain.dtype).tiny))
        codes[strip].addcmul_(change, best, value=-1)
        errors[strip].add_(c.mul_(best))
        # The last sweep does not update slopes of columns it has already visited.
        slopes[after].addmm_(curvature[after, strip], c)

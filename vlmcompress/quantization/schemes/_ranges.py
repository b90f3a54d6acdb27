"""Clipping ranges of groups of columns, chosen by squared error.

If a range covers a whole group, the group's largest value alone determines the step. A smaller range clips but has a finer
step; with symmetric codes, which have one more value below zero than above, a larger range may also be better.

`ranges_of_least_error` chooses for each row and group the share of the plain range with the smallest error of rounding to
nearest,

    sum_j v_j (w_j - Q(w_j))^2

With `v_j = R_jj^2` of GPTQ's factor, the term of column j is what it adds to the output error after optimal compensation by
later columns; with the diagonal of the Gram matrix, what it adds without feedback. The shares form a fixed grid. Each group
tries every third share and then the two next to its best one; NVFP4 and MX, whose scales are coarser, try all.
Cost: the weight is rounded `steps / 3 + 4` times.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import Format, find_ranges, remainder, scale_from_range, to_codes
from vlmcompress.quantization.schemes._fused import kernels

Params = tuple[Tensor, Tensor | None]
"""Scale and zero point of each piece."""
LARGEST, SMALLEST = 1.2, 0.4  # shares of the plain range that are tried
_COARSE = 3  # every third share of the grid is tried first, then the two next to the best
_COLUMNS = 128  # columns, in whole groups, whose errors are computed together
_CACHED = 1 << 17  # elements per part, so that a few float32 copies fit into a core's cache


def ranges_of_least_error(
    w: Tensor,
    importance: Tensor,
    fmt: Format,
    steps: int = 20,
    *,
    scale_dtype: torch.dtype = torch.float32,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of `w [out, in]`, each group with the share of its range that has the smallest error.

    Args:
        w: any float dtype.
        importance: weight of a squared error in each column, at least 0: `[in]`.
        fmt: a format with a scale for each group of columns or row.
        steps: number of shares, evenly spaced from `LARGEST` (with zero points from 1) down to `SMALLEST`. The plain range is
            always tried as well, so no group has a larger error than with it.
        scale_dtype: dtype the scale is stored in.
        global_scale: NVFP4's global scale `[1]`.
    """
    low, high = find_ranges(w, fmt, importance)
    kwargs: dict[str, Any] = {"scale_dtype": scale_dtype, "importance": importance, "global_scale": global_scale}
    # With zero points a wider range would only make the step coarser.
    shares = torch.linspace(LARGEST if fmt.symmetric else 1.0, SMALLEST, steps)
    step = float(shares[0] - shares[1])

    def ranges(share: float | Tensor) -> Params:
        return scale_from_range(w, low * share, high * share, fmt, max_code=fmt.max_codes[0], **kwargs)

    def best(tried: list[Params]) -> tuple[Tensor, Params]:
        scales = torch.stack([scale for scale, _ in tried])  # [k, out, n_groups]
        zeros = None if fmt.symmetric else torch.stack([zero for _, zero in tried if zero is not None])
        fused = kernels(w.device, fmt)
        errors = (fused.range_errors if fused else _errors)(w, scales, zeros, importance, fmt)
        least = errors.min(0, keepdim=True).indices  # on a CPU six times as fast as argmin
        return least[0], (scales.gather(0, least)[0], None if zeros is None else zeros.gather(0, least)[0])

    # The error is almost smooth in the share: try every third one, then the two next to the best. The plain range is always
    # tried; for symmetric codes the better of its two scales.
    plain = scale_from_range(w, low, high, fmt, **kwargs)
    some = shares[:: 1 if fmt.nvfp4 or fmt.mx else _COARSE].tolist()
    chosen, params = best([plain, *map(ranges, some)])
    share = low.new_tensor([1.0, *some])[chosen]
    return best([params, ranges(share + step), ranges(share - step)])[1]


def _errors(w: Tensor, scales: Tensor, zeros: Tensor | None, importance: Tensor, fmt: Format) -> Tensor:
    """Squared errors of rounding each piece of `w [out, in]` to nearest: `[k, out, n_groups]`, as `scales` and `zeros`.

    Works on transposed groups, some rows at a time, which stay in a CPU's cache while all k candidates are tried.
    """
    (k, out, n_groups), size = scales.shape, w.shape[1] // scales.shape[2]
    errors, some = torch.empty(k, n_groups, 1, out, device=w.device), max(1, _COLUMNS // size)
    pieces, counts = w.unflatten(1, (n_groups, size)), importance.view(n_groups, 1, size)
    tried = [scales.float()] if zeros is None else [scales.float(), fmt.qmin - zeros.float(), fmt.qmax - zeros.float()]
    tried = [each.permute(0, 2, 1).contiguous()[:, :, None] for each in tried]  # [k, n_groups, 1, out]
    step = max(16, _CACHED // (some * size)) if w.device.type == "cpu" else out
    for a, g in itertools.product(range(0, out, step), range(0, n_groups, some)):
        rows, groups = slice(a, a + step), slice(g, g + some)
        part = pieces[rows, groups].float().permute(1, 2, 0).contiguous()
        d = torch.empty_like(part)
        for error, scale, *bounds in zip(*(each[:, groups, :, rows] for each in (errors, *tried)), strict=True):
            torch.div(part, scale, out=d)
            if bounds:  # codes counted from the zero point
                d.round_().clamp_(*bounds)
            else:
                to_codes(d, fmt)
            # sum_j v_j (w_j - Q(w_j))^2: [groups, 1, size] x [groups, size, rows]
            error.copy_(torch.bmm(counts[groups], remainder(part, d, scale, None, out=d).square_()))
    return errors[:, :, 0].transpose(1, 2)

"""Clipping ranges of groups of columns, chosen by squared error: each group alone, or all groups under the whole Gram matrix.

If a range covers a whole group, the group's largest value alone determines the step. A smaller range clips but has a finer
step; with symmetric codes, which have one more value below zero than above, a larger range may also be better.

`ranges_of_least_error` chooses for each row and group the share of the plain range with the smallest error of rounding to
nearest,

    sum_j v_j (w_j - Q(w_j))^2

With `v_j = R_jj^2` of GPTQ's factor, the term of column j is what it adds to the output error after optimal compensation by
later columns; with the diagonal of the Gram matrix, what it adds without feedback. The shares form a fixed grid. Each group
tries every third share and then the two next to its best one; NVFP4 and MX, whose scales are coarser, try all.
Cost: the weight is rounded `steps / 3 + 4` times.

`refined` is coordinate descent on scales. A search that looks at one group of a row alone minimizes `d_g G_gg d_g^T` with the
group's own block of G. The error of the row's output also has cross terms with the errors of all other groups,

    e(d) = d G d^T = d_g G_gg d_g^T + 2 d_g (sum over h != g of G_gh d_h) + what does not depend on d_g

which are as large where input channels are correlated. Here each group in turn takes the range with the smallest `e` while the
others are fixed, so that the error of one group can compensate for that of another. Wider ranges than the group's own are
tried as well, as another grid may give errors of the opposite sign. No row's error ever grows.
Cost per sweep: `out * in * (17 * group + in)` multiply-adds, and 17 roundings of the weight. The codes are still those of
rounding to nearest (`gptq` improves on that). Loses: ranges fitted to few tokens suit others less well.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import Format, find_ranges, remainder, residual, scale_from_range, to_codes
from vlmcompress.quantization.schemes._fused import kernels

Params = tuple[Tensor, Tensor | None]
"""Scale and zero point of each piece."""
LARGEST, SMALLEST = 1.2, 0.4  # shares of the plain range that are tried
RATIOS = tuple(1.12 - 0.04 * k for k in range(16))
"""Shares of each group's range that `refined` tries."""
_COARSE = 3  # every third share of the grid is tried first, then the two next to the best
_ROWS = 256  # rows whose candidates are tried together
_COLUMNS = 128  # columns, in whole groups, whose errors are computed together
_CACHED = 1 << 17  # elements per part, so that a few float32 copies fit into a core's cache


def ranges_of_least_error(
    w: Tensor,
    importance: Tensor,
    fmt: Format,
    steps: int,
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


def refined(
    w: Tensor, scale: Tensor, zero: Tensor | None, gram: Tensor, fmt: Format, sweeps: int
) -> tuple[Tensor, Tensor | None]:
    """Choose each group's range again under the whole Gram matrix, `sweeps` times.

    Args:
        w: `[out, in]`.
        scale: `[out, n_groups]` to start from, in its stored dtype; `zero`: int8 zero points of the same shape, or None.
        gram: `[in, in]`, Gram matrix of the inputs.
        fmt: an integer format, with a scale per group or row.

    Returns:
        new scale and zero point, shaped like the arguments.
    """
    low, high = find_ranges(w, fmt, gram.diagonal())
    kwargs = {"scale_dtype": scale.dtype, "max_code": fmt.max_codes[0]}
    tried = [scale_from_range(w, low * ratio, high * ratio, fmt, **kwargs) for ratio in RATIOS]  # type: ignore[arg-type]
    # [1 + ratios, out, n_groups]; the first is the current one, and at the end the chosen one
    scales = torch.stack([scale, *(tried_scale for tried_scale, _ in tried)])
    zeros = None
    if zero is not None:
        zeros = torch.stack([zero, *(tried_zero for _, tried_zero in tried if tried_zero is not None)])
    size = w.shape[1] // scale.shape[1]
    for a in range(0, len(w), _ROWS):
        part = w[a : a + _ROWS].float()
        d = residual(part, scale[a : a + _ROWS], None if zero is None else zero[a : a + _ROWS], fmt)
        products, rows = d @ gram, torch.arange(len(part), device=w.device)
        for group in [*range(scale.shape[1])] * sweeps:
            columns = slice(group * size, (group + 1) * size)
            block_gram, old = gram[columns, columns], d[:, columns]
            rest = products[:, columns] - old @ block_gram  # sum over h != g of d_h G_hg
            choices = scales[:, a : a + _ROWS, group]
            zeros_of_group = None if zeros is None else zeros[:, a : a + _ROWS, group]
            # d_g of every choice at once, [1 + ratios, rows, group], as rows of one matrix
            errors = residual(
                part[:, columns].repeat(len(scales), 1),
                choices.flatten()[:, None],
                None if zeros_of_group is None else zeros_of_group.flatten()[:, None],
                fmt,
            ).unflatten(0, (len(scales), -1))
            # e(d) = d_g G_gg d_g^T + 2 d_g rest; the minimum cannot exceed the current range's
            best = ((errors @ block_gram).add_(rest, alpha=2).mul_(errors)).sum(-1).argmin(0)
            new = errors[best, rows]
            products.addmm_(new - old, gram[columns])
            d[:, columns] = new
            choices[0] = choices[best, rows]
            if zeros_of_group is not None:
                zeros_of_group[0] = zeros_of_group[best, rows]
    return scales[0], None if zeros is None else zeros[0]

"""Ranges of rounding chosen one group of columns after the other under the whole Gram matrix: coordinate descent on scales.

A clip search that looks at one group of a row alone minimizes `d_g G_gg d_g^T` with the group's own block of G. The error of
the row's output has products with all other groups' errors besides,

    e(d) = d G d^T = d_g G_gg d_g^T + 2 d_g (sum over h != g of G_gh d_h) + what does not depend on d_g

and where input channels are correlated they are as large. Here each group in turn takes the range of least `e`, the others
being as they are, so that one group's error makes up for another's. Ranges wider than the group's own are among those tried,
as any other grid may have errors of another sign. No row's error ever grows.

Cost: for each sweep `out * in * (17 * group + in)` multiply-adds, and 17 roundings of the weight. What remains of the error is
in the codes, which are those of rounding to nearest (`gptq` changes them). Loses: ranges fitted to few tokens fit others less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmcompress.numerics import Format, find_ranges, fit, residual

RATIOS = tuple(1.12 - 0.04 * k for k in range(16))
"""Shares of the range of each group that are tried: down to half."""
_ROWS = 256  # whose candidates are tried together


def refined(
    w: Tensor, scale: Tensor, zero: Tensor | None, gram: Tensor, fmt: Format, sweeps: int
) -> tuple[Tensor, Tensor | None]:
    """Choose each group's range again, `sweeps` times.

    Args:
        w: `[out, in]`.
        scale: `[out, n_groups]` in the dtype that it is stored in, to start from; `zero`: int8 zero points like it, or None.
        gram: `[in, in]`, of the inputs.
        fmt: an integer format, in groups or rows.

    Returns:
        scale and zero point like those given.
    """
    parts = [
        _refined(
            w[a : a + _ROWS].float(),
            scale[a : a + _ROWS],
            None if zero is None else zero[a : a + _ROWS],
            gram,
            fmt,
            sweeps,
        )
        for a in range(0, len(w), _ROWS)
    ]
    zeros = None if zero is None else torch.cat([part for _, part in parts if part is not None])
    return torch.cat([part for part, _ in parts]), zeros


def _refined(
    w: Tensor, scale: Tensor, zero: Tensor | None, gram: Tensor, fmt: Format, sweeps: int
) -> tuple[Tensor, Tensor | None]:
    """Compute `refined` for some rows."""
    low, high = find_ranges(w, fmt, gram.diagonal())
    how = {"scale_dtype": scale.dtype, "edge": fmt.edges[0]}
    tried = [fit(w, low * ratio, high * ratio, fmt, **how) for ratio in RATIOS]  # type: ignore[arg-type]
    scales = torch.stack([scale, *(found for found, _ in tried)])  # [1 + ratios, out, n_groups]; the first is what is
    zeros = None if zero is None else torch.stack([zero, *(found for _, found in tried if found is not None)])
    d = residual(w, scale, zero, fmt)
    products, rows = d @ gram, torch.arange(len(w), device=w.device)
    size = w.shape[1] // scale.shape[1]
    for group in [*range(scale.shape[1])] * sweeps:
        columns = slice(group * size, (group + 1) * size)
        own, old = gram[columns, columns], d[:, columns]
        rest = products[:, columns] - old @ own
        own_zeros = None if zeros is None else zeros[..., group].flatten()[:, None]
        errors = residual(
            w[:, columns].repeat(len(scales), 1), scales[..., group].flatten()[:, None], own_zeros, fmt
        ).unflatten(0, (len(scales), -1))
        best = ((errors @ own).add_(rest, alpha=2).mul_(errors)).sum(-1).argmin(0)
        new = errors[best, rows]
        products.addmm_(new - old, gram[columns])
        d[:, columns] = new
        scales[0, :, group] = scales[best, rows, group]
        if zeros is not None:
            zeros[0, :, group] = zeros[best, rows, group]
    return scales[0], None if zeros is None else zeros[0]

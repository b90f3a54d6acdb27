"""Ranges of groups chosen by the squared error that each column counts for.

A range that covers all of a group has a step that its largest value alone decides. A smaller one has a finer step and clips;
with symmetric codes, of which there is one more below zero than above, a larger one may be better, too. For each row and group
the share of the plain range is taken whose error of rounding to nearest

    sum_j v_j (w_j - Q(w_j))^2

is least. With `v_j = R_jj^2` of GPTQ's factor that is what column j adds to the output error once later columns have taken on
what they can of its error; with the diagonal of the Gram matrix it is what it adds without feedback. The shares are a fixed
grid, tried with each piece by itself. Cost: `steps` roundings of the weight, next to nothing beside feedback.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import Format, find_ranges, fit, residual, row_chunks

LARGEST, SMALLEST = 1.2, 0.4  # shares of the plain range that are tried


def least_error(
    w: Tensor,
    importance: Tensor,
    fmt: Format,
    steps: int,
    *,
    scale_dtype: torch.dtype = torch.float32,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of `w [out, in]`, each piece with the share of its range that errs least; as `numerics.fit`.

    Args:
        w: any float dtype.
        importance: weight of a squared error in each column, at least 0: `[in]`.
        fmt: a format with a scale for each group of columns or row.
        steps: how many shares are tried, evenly from `LARGEST` (with zero points from 1) down to `SMALLEST`. The plain range is
            among what is tried in any case, so no piece errs more than in it.
        scale_dtype: dtype the scale is stored in.
        global_scale: of NVFP4, the number `[1]` that scales are relative to.
    """
    found = [_least_error(w[rows].float(), importance, fmt, steps, scale_dtype, global_scale) for rows in row_chunks(w)]
    zero = None if fmt.symmetric else torch.cat([zero for _, zero in found if zero is not None])
    return torch.cat([scale for scale, _ in found]), zero


def _least_error(
    w: Tensor, importance: Tensor, fmt: Format, steps: int, scale_dtype: torch.dtype, global_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute `least_error` for some rows, float32."""
    low, high = find_ranges(w, fmt, importance)
    how: dict[str, Any] = {"scale_dtype": scale_dtype, "importance": importance, "global_scale": global_scale}

    def tried(share: float, edge: float | None) -> tuple[Tensor, Tensor | None, Tensor]:
        scale, zero = fit(w, low * share, high * share, fmt, edge=edge, **how)
        error = residual(w, scale, zero, fmt).square_().mul_(importance)
        return scale, zero, error.view(*scale.shape, -1).sum(-1)

    scale, zero, least = tried(1.0, None)
    for share in torch.linspace(LARGEST if fmt.symmetric else 1.0, SMALLEST, steps).tolist():
        other, other_zero, error = tried(share, fmt.edges[0])
        falls = error < least
        scale, least = torch.where(falls, other, scale), torch.minimum(error, least)
        zero = None if zero is None or other_zero is None else torch.where(falls, other_zero, zero)
    return scale, zero

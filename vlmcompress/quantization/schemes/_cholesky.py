"""Cholesky's factor of a large matrix in a chosen order of columns, in place and by blocks."""

from __future__ import annotations

import torch
from torch import Tensor

_FACTORED = 256  # columns that are factorized at a time


def reordered(h: Tensor, order: Tensor) -> Tensor:
    """Lower block triangle of `h [in, in]` with rows and columns in `order`; 0 elsewhere."""
    reordered = torch.zeros_like(h)
    for a in range(0, len(h), _FACTORED):
        b = min(a + _FACTORED, len(h))
        reordered[a:b, :b] = h.index_select(0, order[a:b]).index_select(1, order[:b])
    return reordered


def factorize(h: Tensor) -> bool:
    """Factor `h [in, in]`, a lower block triangle, as `R R^T` with `R` upper triangular; write `R^T` over it.

    By blocks from the last on, as R is Cholesky's factor of `h` with rows and columns reversed. In place, as `h` may be the
    largest tensor of the run. Returns whether `h` is definite.
    """
    failed = []
    for a in reversed(range(0, len(h), _FACTORED)):
        b = min(a + _FACTORED, len(h))
        panel = h[a:b, :b].addmm_(h[b:, a:b].T, h[b:, :b], alpha=-1) if b < len(h) else h[a:b]
        lower, info = torch.linalg.cholesky_ex(panel[:, a:].flip(0, 1))
        upper = lower.flip(0, 1)
        panel[:, a:] = upper.T
        panel[:, :a] = torch.linalg.solve_triangular(upper, panel[:, :a], upper=True)
        failed.append(info)
    return not torch.stack(failed).any()

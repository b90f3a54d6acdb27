"""Local search after rounding: codes and scales that lower the output error further, one at a time.

GPTQ fixes a column once, before it knows what later columns round to. With all codes known, the error of a row

    f(q) = (w - q) G (w - q)^T

is a quadratic in each single code and in each single scale, whose least point is found in closed form. With the errors
`d = w - q` and `p = d G`, half the downward slope, one *sweep* goes through the columns and sets each to the nearest code of

    q_j + p_j / G_jj

while all others stay (cyclic coordinate descent: QuantEase, arXiv 2309.01885, eq. 7; CDQuant, arXiv 2406.17542, takes the best
column in the place of the next). Before the first sweep each group's scale is refitted to its codes: with values `q = s c`, `c`
the codes without zero points,

    s + sum_j c_j p_j / (c G c^T)       over the group's columns

is the best scale, of which the dtype that it is stored in takes the nearest, if that is better than the old one. No step raises
f, so more sweeps are never worse on the statistics that they are given. Rows are independent, and are taken at once.

The slopes p of all columns are kept, and follow each change. Codes that GPTQ chose are mostly the best already: a sweep changes
one or two in a hundred, so that on a CPU a product of the changes as a sparse matrix costs a tenth of a dense one.

Cost: `out * in^2` multiply-adds for p, half of that again for refitted scales, and for each sweep as much again (a tenth on a
CPU). Loses: it ends where no single code can improve; what two together could, it does not see. It fits the calibration tokens
closer than feedback alone does.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmcompress.numerics import Format, QTensor, as_stored, dequantize, to_codes
from vlmcompress.quantizers._fused import kernels

_SPAN = 128  # columns whose changes reach all other columns' slopes in one product
_STRIP = 16  # columns within which slopes follow each change one by one
_ROWS = 4096  # rows that are searched at a time on a CPU, for each thread
_SPARSE = 0.05  # share of codes that change below which a sparse product is the faster one on a CPU


def descend(
    weights: Sequence[Tensor], quantized: Sequence[QTensor], gram: Tensor, sweeps: int, refit: bool = True
) -> list[QTensor]:
    """Lower `tr(dW G dW^T)` of each of `weights [out_i, in]`, starting from them `quantized`.

    Args:
        weights: what was quantized, all with the same input.
        quantized: their quantized matrices, of one format with scales for rows or groups.
        gram: `[in, in]`, symmetric, with no negative eigenvalue.
        sweeps: how often all columns are visited; 0 returns `quantized`.
        refit: whether scales are refitted to their codes first.
    """
    if not sweeps:
        return list(quantized)
    weight, codes = torch.cat(list(weights)), torch.cat([tensor.q.view(torch.int8) for tensor in quantized])
    scales = torch.cat([tensor.step.float() for tensor in quantized])
    zeros = [tensor.zero_point for tensor in quantized if tensor.zero_point is not None]
    whole = _Matrix(codes.view(quantized[0].q.dtype), scales, torch.cat(zeros).float() if zeros else None)
    for rows in _row_parts(weight):
        search = _Search(weight[rows], whole.rows(rows), quantized[0], gram, refit)
        for _ in range(sweeps):
            search.sweep()
    lengths = [len(weight) for weight in weights]
    return [
        QTensor.of(
            q,
            s if old.format.nvfp4 or old.format.mx else s.to(old.scale.dtype),
            old.zero_point,
            old.format,
            old.global_scale,
        )
        for q, s, old in zip(whole.codes.split(lengths), scales.split(lengths), quantized, strict=True)
    ]


def _row_parts(weight: Tensor) -> list[slice]:
    """Split the rows of `weight [out, in]` so that a span's columns stay in a CPU's cache; elsewhere not at all."""
    step = _ROWS * torch.get_num_threads() if weight.device.type == "cpu" else len(weight)
    return [slice(a, a + step) for a in range(0, len(weight), step)]


@dataclass(frozen=True)
class _Matrix:
    """What a search changes in place, `codes [out, in]` and `scales [out, n_groups]`; and `zeros` like these, or None."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def rows(self, rows: slice) -> _Matrix:
        """Some rows, which share memory."""
        return _Matrix(self.codes[rows], self.scales[rows], None if self.zeros is None else self.zeros[rows])

    def values(self, columns: slice) -> Tensor:
        """Codes of a group's columns without its zero points, float32 `[out, columns]`."""
        codes = self.codes[:, columns].float()
        size = self.codes.shape[1] // self.scales.shape[1]
        return codes if self.zeros is None else codes.sub_(self.zeros[:, columns.start // size, None])


class _Search:
    """The search for some rows, which changes their `matrix`, with half the downward slopes of all their codes, `[out, in]`."""

    def __init__(self, weight: Tensor, matrix: _Matrix, like: QTensor, gram: Tensor, refit: bool):
        """Args: `weight`: what was quantized, `[out, in]`; `like`: a matrix of the same format."""
        self.matrix, self.like, self.gram = matrix, like, gram
        self.size = len(gram) // matrix.scales.shape[1]  # columns of a group
        inverse = 1 / gram.diagonal()
        self.inverse = torch.where(inverse.isfinite(), inverse, 0.0)  # columns of no weight stay as they are
        errors = weight - dequantize(matrix.codes, matrix.scales, matrix.zeros, like.format)
        self.slopes = self._refitted(errors) if refit else errors @ gram

    def sweep(self) -> None:
        """Visit all columns once."""
        matrix, fused = self.matrix, kernels(self.gram.device, self.like.format)
        recode = fused.recode if fused else _recode
        for a in range(0, len(self.gram), _SPAN):
            b = min(a + _SPAN, len(self.gram))
            changes = recode(self.slopes, matrix.codes, matrix.scales, self.inverse, self.gram, a, b, self.like.format)
            _add_product(self.slopes, changes, self.gram[a:b])

    def _refitted(self, errors: Tensor) -> Tensor:
        """Refit all scales, which changes `errors [out, in]`; returns the slopes."""
        slopes, span = torch.empty_like(errors), max(self.size, _SPAN // self.size * self.size)
        for a in range(0, len(self.gram), span):
            b = min(a + span, len(self.gram))
            slopes[:, a:b] = errors @ self.gram[:, a:b]
            for c in range(a, b, self.size):
                d = c + self.size
                change = self._refit(c, slopes[:, c:d])
                errors[:, c:d] += change
                slopes[:, :b].addmm_(change, self.gram[c:d, :b])
        return slopes

    def _refit(self, a: int, slopes: Tensor) -> Tensor:
        """Refit the scales of the group from column `a` on; returns how its errors change: `[out, size]`, as `slopes`."""
        b, g = a + self.size, a // self.size
        codes = self.matrix.values(slice(a, b))
        slope = (codes * slopes).sum(1)
        bend = (codes * (codes @ self.gram[a:b, a:b])).sum(1)
        old = self.matrix.scales[:, g]
        target = old + torch.where(bend > 0, slope / bend, 0.0)
        new = as_stored(target, self.like.format, self.like.scale.dtype, self.like.global_scale).float()
        step = new - old
        better = (target > 0) & (step * (2 * slope - step * bend) > 0)
        self.matrix.scales[:, g] = torch.where(better, new, old)
        return codes * torch.where(better, -step, 0.0)[:, None]


def _recode(
    slopes: Tensor, codes: Tensor, scales: Tensor, inverse: Tensor, gram: Tensor, a: int, b: int, fmt: Format
) -> Tensor:
    """Choose the codes of columns `a` to `b` one after another, given half the slopes of all, `[out, in]`.

    Works in units of the group's step, where errors change by whole codes, on the transpose, whose columns are contiguous.

    Args:
        codes: `[out, in]`, changed in place; `scales`: `[out, n_groups]`.
        inverse: `[in]`, of the diagonal of `gram [in, in]`; 0 where that is 0.

    Returns:
        how the errors of these columns change: `[out, columns]`.
    """
    size = len(gram) // scales.shape[1]
    ahead, old = _transposed(slopes[:, a:b]), _transposed(codes[:, a:b]).float()
    changes = torch.zeros_like(old)
    for c, d in _strips(a, b, size):
        columns, scale = slice(c - a, d - a), scales[:, c // size].contiguous()
        rate, changed = inverse[c:d, None], changes[columns]
        targets = (ahead[columns] * rate).div_(scale).add_(old[columns])
        factors = (gram[c:d, c:d] * rate).tril_(-1).unbind()  # 0 for columns that are not visited yet
        for target, code, change, row in zip(
            targets.unbind(), old[columns].unbind(), changed.unbind(), factors, strict=True
        ):
            torch.sub(code, to_codes(target.addmv_(changed.T, row), fmt), out=change)
        old[columns] = targets
        changed.mul_(scale)
        ahead[d - a :].addmm_(gram[d:b, c:d], changed)
    codes[:, a:b] = _transposed(old.to(codes.dtype))
    return changes.T


def _strips(a: int, b: int, size: int) -> list[tuple[int, int]]:
    """Cut columns `a` to `b` into strips within groups of `size` columns."""
    edges = sorted({a, b, *range(a, b, _STRIP), *range(-(-a // size) * size, b, size)})
    return list(itertools.pairwise(edges))


def _transposed(x: Tensor) -> Tensor:
    """The transpose of `x`, contiguous. Of a part of a matrix two copies are faster than one with strides both ways."""
    return x.contiguous().T.contiguous()


def _add_product(slopes: Tensor, changes: Tensor, gram: Tensor) -> None:
    """Add `changes [out, columns] @ gram [columns, in]` to `slopes [out, in]`; few of the changes are not 0."""
    slopes.addmm_(_sparse(changes.contiguous()) if slopes.device.type == "cpu" else changes, gram)


def _sparse(changes: Tensor) -> Tensor:
    """`changes [out, columns]` as a sparse matrix, or as they are where many are not 0; faster than `to_sparse_csr`."""
    flat, (rows, columns) = changes.view(-1), changes.shape
    places = (flat != 0).nonzero().view(-1)
    if len(places) > _SPARSE * len(flat):
        return changes
    first = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum((places // columns).bincount(minlength=rows), 0, out=first[1:])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR tensor support is in beta|invariant checks are implicitly)")
        return torch.sparse_csr_tensor(first, places % columns, flat[places], changes.shape, check_invariants=False)

"""Triton kernels for the column by column steps of quantizers on a GPU, where launching a kernel takes longer than a column.

Each replaces hundreds of launches of a torch function, with the same arguments and the same results up to the order of sums:
`visit` is `_columns._visit`, `descend` is `_local_search.descend`, `range_errors` is `_ranges._errors`. Those are the
references and run everywhere else; a test compares them in Triton's interpreter (`TRITON_INTERPRET=1`), which needs no GPU.

A program handles some rows of the weight. `visit` keeps the values to round of a block of columns in registers; once a column
is rounded, it adds the correction for its error to the columns after it. `descend` keeps the slopes of a block in registers.
Quotients are rounded as in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmcompress.numerics import Format

SEARCHED = 256  # most columns that `descend` can search
_COLUMNS = 128  # most columns per program of the other kernels
_ROWS = 32  # rows per program
_FEW = 16  # rows per program of `descend`, which holds all columns in registers


@triton.jit
def _to_codes(x, qmin, qmax, FP4: tl.constexpr):
    """`numerics.to_codes`: adding and subtracting 1.5 * 2^23 rounds to integers, halves to even."""
    if FP4:
        size = tl.minimum(tl.maximum(tl.abs(x), 1.0), 6.0)
        power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        magic = power * 6291456.0
        codes = (tl.minimum(tl.maximum(x, -6.0), 6.0) + magic) - magic
        return tl.where(x < 0, -tl.abs(codes), codes)
    else:
        codes = (tl.minimum(tl.maximum(x, qmin - 1), qmax + 1) + 12582912.0) - 12582912.0
        return tl.minimum(tl.maximum(codes, qmin), qmax)


@triton.jit
def _visit(
    targets, rows, codes, matrix, scales, zeros, groups, columns, out, pitch, qmin, qmax,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    left = tl.load(targets + k[:, None] * out + n[None, :], mask=(k < columns)[:, None] & (n < out)[None, :], other=0.0)
    for i in range(0, columns):
        group = tl.load(groups + i)
        scale = tl.load(scales + group * out + n, mask=n < out, other=1.0)
        target = tl.sum(tl.where((k == i)[:, None], left, 0.0), 0)
        x = tl.div_rn(target, scale)
        if ZEROS:
            zero = tl.load(zeros + group * out + n, mask=n < out, other=0.0)
            code = _to_codes(x + zero, qmin, qmax, FP4)
            value = (code - zero) * scale
        else:
            code = _to_codes(x, qmin, qmax, FP4)
            value = code * scale
        place = i * out + n
        error = tl.load(rows + place, mask=n < out, other=0.0) - value
        tl.store(targets + place, target, mask=n < out)
        tl.store(codes + place, code, mask=n < out)
        tl.store(rows + place, error, mask=n < out)
        factors = tl.load(matrix + k * pitch + i, mask=(k > i) & (k < columns), other=0.0)
        left += factors[:, None] * error[None, :]


def visit(
    targets: Tensor,
    rows: Tensor,
    codes: Tensor,
    matrix: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor,
    fmt: Format,
) -> None:
    """Round a block of columns one after another; see `_columns._visit`. `groups`: int32, on the device."""
    width, out = targets.shape
    for a in range(0, width, _COLUMNS):
        b = min(a + _COLUMNS, width)
        if a:
            targets[a:b].addmm_(matrix[a:b, :a], rows[:a])
        _visit[(triton.cdiv(out, _ROWS),)](
            targets[a:b], rows[a:b], codes[a:b], matrix[a:b, a:b], scales, scales if zeros is None else zeros,
            groups[a:b], b - a, out, matrix.stride(0), fmt.qmin, fmt.qmax,
            COLUMNS=max(16, triton.next_power_of_2(b - a)), ROWS=_ROWS, ZEROS=zeros is not None, FP4=fmt.fp4,
        )  # fmt: skip


@triton.jit
def _descend(
    codes, errors, slopes, curvature, steps, columns, out, strip, turns, tie, qmin, qmax,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    inside, place = (k < columns)[:, None] & (n < out)[None, :], k[:, None] * out + n[None, :]
    left = tl.load(slopes + place, mask=inside, other=0.0)
    code = tl.load(codes + place, mask=inside, other=0.0)
    error = tl.load(errors + place, mask=inside, other=0.0)
    step = tl.load(steps + place, mask=inside, other=1.0)
    diagonal = tl.load(curvature + k * columns + k, mask=k < columns, other=1.0)[:, None]
    rate, half = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), diagonal * step), diagonal * (0.5 + tie * k)[:, None]
    for turn in range(0, turns):
        first = (turn * strip) % (tl.cdiv(columns, strip) * strip)
        change = code - _to_codes(code + left * rate, qmin, qmax, FP4)
        c = change * step
        tried = ((k >= first) & (k < first + strip))[:, None] & inside
        gain = tl.where(tried, (left + c * half) * c, 0.0)
        best = tl.argmin(gain, 0)
        changed = (k[:, None] == best[None, :]) & (gain < 0)
        code -= tl.where(changed, change, 0.0)
        c = tl.where(changed, c, 0.0)
        error += c
        factors = tl.load(curvature + k[:, None] * columns + best[None, :], mask=(k < columns)[:, None], other=0.0)
        left += factors * tl.sum(c, 0)[None, :]
    tl.store(codes + place, code, mask=inside)
    tl.store(errors + place, error, mask=inside)


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
    """Improve the codes of a block of at most `SEARCHED` columns; see `_local_search.descend`."""
    columns, out = codes.shape
    _descend[(triton.cdiv(out, _FEW),)](
        codes, errors, slopes, curvature.contiguous(), steps, columns, out, width, sweeps * triton.cdiv(columns, width), tie,
        fmt.qmin, fmt.qmax, COLUMNS=max(16, triton.next_power_of_2(columns)), ROWS=_FEW, FP4=fmt.fp4, num_warps=8,
    )  # fmt: skip


@triton.jit
def _range_errors(
    w, scales, zeros, counts, errors, tried, out, width, size, n_groups, qmin, qmax,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    k = tl.arange(0, COLUMNS)
    for i in range(0, tried):
        place = (i * out + n) * n_groups + group
        scale = tl.load(scales + place, mask=n < out, other=1.0)
        zero = tl.load(zeros + place, mask=n < out, other=0.0) if ZEROS else tl.zeros_like(scale)
        total = tl.zeros_like(scale)
        for c in range(0, size, COLUMNS):
            inside = c + k < size
            column = group * size + c + k
            x = tl.load(
                w + n[:, None] * width + column[None, :], mask=(n < out)[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)
            code = _to_codes(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)) + zero[:, None], qmin, qmax, FP4)
            rest = x - (code - zero[:, None]) * scale[:, None]
            total += tl.sum(rest * rest * tl.load(counts + column, mask=inside, other=0.0)[None, :], 1)
        tl.store(errors + place, total, mask=n < out)


def range_errors(w: Tensor, scales: Tensor, zeros: Tensor | None, importance: Tensor, fmt: Format) -> Tensor:
    """Squared errors `[k, out, n_groups]` of rounding with each of k scales; see `_ranges._errors`."""
    (tried, out, n_groups), width = scales.shape, w.shape[1]
    w, scales = w.contiguous(), scales.float().contiguous()
    zeros = None if zeros is None else zeros.float().contiguous()
    errors, size = torch.empty_like(scales), width // n_groups
    _range_errors[(triton.cdiv(out, _ROWS), n_groups)](
        w, scales, scales if zeros is None else zeros, importance.contiguous(), errors, tried, out, width, size, n_groups,
        fmt.qmin, fmt.qmax, COLUMNS=min(_COLUMNS, max(16, triton.next_power_of_2(size))), ROWS=_ROWS,
        ZEROS=zeros is not None, FP4=fmt.fp4,
    )  # fmt: skip
    return errors

"""Find scales, round, dequantize: the arithmetic of all formats; see the package for its conventions.

A scale is always the factor by which a code is multiplied; for NVFP4, MXFP4 and MXFP8 in float32, rounded to a value that can
be stored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vlmcompress.numerics import _fp4, _mx
from vlmcompress.numerics._formats import FLOAT8, Format

_CACHED = 1 << 17  # elements per part, so that a few temporaries fit into a core's cache


def find_params(
    w: Tensor,
    fmt: Format,
    *,
    scale_dtype: torch.dtype = torch.float32,
    importance: Tensor | None = None,
    max_code: float | None = None,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Find the scale and zero point that cover the range of each group of `w`.

    Args:
        w: `[out, in]`, any float dtype.
        fmt: the format to fit.
        scale_dtype: dtype the scale is stored in; ignored for NVFP4, MXFP4 and MXFP8.
        importance: weight of a squared error in each column, at least 0: `[in]` (the diagonal of a Gram matrix) or
            `[out, in]`; None: all 1. Columns of weight 0 do not widen a range, unless all columns of the group have weight 0.
        max_code: the code that the largest magnitude of a symmetric group is mapped to; None: the one of `fmt.max_codes` with
            the smallest error of rounding to nearest.
        global_scale: NVFP4's global scale `[1]`; None: computed from these ranges, accurate enough to compare ways of
            rounding.

    Returns:
        scale `[out, n_groups]` (`[1]` per matrix) in `scale_dtype`, and the int8 zero point of that shape, or None. NVFP4:
        float32, rounded to float8 divided by the global scale; MXFP4 and MXFP8: float32 powers of two.
    """
    low, high = find_ranges(w, fmt, importance)
    kwargs = {"scale_dtype": scale_dtype, "max_code": max_code, "global_scale": global_scale}
    return scale_from_range(w, low, high, fmt, importance=importance, **kwargs)  # type: ignore[arg-type]


def find_ranges(w: Tensor, fmt: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group of `w`, widened to include 0: float32, shaped like the scale. `importance`: as
    in `find_params`. Raises ValueError for NaN or Inf."""
    if importance is not None and importance.device.type == "cpu" and importance.amin() > 0:
        importance = None  # saves a pass; on an accelerator, waiting for the result would cost more
    lows, highs, bounds = [], [], []
    for rows, part in _row_parts(w, fmt):
        pieces, counts = _pieces(part, fmt), _of(importance, rows)
        if counts is not None:  # weights of inputs that are always zero have no effect, so they do not widen a range
            bounds += [pieces.amin(), pieces.amax()]  # a NaN among them would be written all the same
            dead = _counts(counts, part, fmt) == 0
            pieces = pieces.masked_fill(dead & ~dead.all(-1, keepdim=True), 0)
        lows.append(pieces.amin(-1).clamp_(max=0))
        highs.append(pieces.amax(-1).clamp_(min=0))
    shape = (1,) if fmt.group == 0 else (len(w), -1)
    low, high = torch.cat(lows).view(shape), torch.cat(highs).view(shape)
    if not torch.stack((low.amin(), high.amax(), *bounds)).isfinite().all():
        raise ValueError("the weight holds NaN or Inf; check that the checkpoint is whole")
    return low, high


def scale_from_range(
    w: Tensor,
    low: Tensor,
    high: Tensor,
    fmt: Format,
    *,
    scale_dtype: torch.dtype = torch.float32,
    importance: Tensor | None = None,
    max_code: float | None = None,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what `find_params` returns, for ranges `low` to `high` of each group of `w`, shaped as by `find_ranges`."""
    if not fmt.symmetric:
        # The zero point is computed with the stored scale, so that 0 is represented exactly.
        scale = _stored((high - low) / (fmt.qmax - fmt.qmin), scale_dtype)
        zero = (fmt.qmin - low / scale.float()).round_().clamp_(fmt.qmin, fmt.qmax)
        return scale, zero.to(torch.int8)
    top = torch.maximum(-low, high)
    divided = _fp4.divisor(top.amax()) if fmt.nvfp4 and global_scale is None else global_scale
    first, *others = [
        as_stored(top / code, fmt, scale_dtype, divided)
        for code in (fmt.max_codes if max_code is None else (max_code,))
    ]
    # For NVFP4 this is Four Over Six's choice: a block's largest value becomes 6 or 4, by the block's squared error. The
    # stored scales are compared, as rounding them to float8 may reverse the order.
    for rows, part in _row_parts(w, fmt) if others else ():
        pieces, counts = _pieces(part, fmt), _of(importance, rows)
        importances = None if counts is None else _counts(counts, part, fmt)
        d, best, least = torch.empty_like(pieces), first[rows], None
        for scale in (first, *others):
            spread, _ = _spread(scale[rows], None)
            remainder(pieces, round_to_codes(pieces, spread, None, fmt, out=d), spread, None, out=d).square_()
            error = (d if importances is None else d.mul_(importances)).sum(-1).view_as(best)
            best = best if least is None else torch.where(error < least, scale[rows], best)
            least = error if least is None else torch.minimum(error, least)
        first[rows] = best
    return first, None


def as_stored(scale: Tensor, fmt: Format, scale_dtype: torch.dtype, global_scale: Tensor | None = None) -> Tensor:
    """Round float32 scales to their stored values, finite and positive. Dtype of the result: see `find_params`."""
    if fmt.mx:
        return _mx.on_grid(scale)
    if fmt.nvfp4:
        if global_scale is None:
            raise ValueError("NVFP4 needs a global scale")
        return _fp4.on_grid(scale, global_scale)
    return _stored(scale, scale_dtype)


def row_chunks(w: Tensor) -> list[slice]:
    """Split the rows of `w [out, in]` so that float32 temporaries of a part fit a CPU's cache; elsewhere one part.

    Arithmetic on weights is a chain of cheap passes, which take several times as long out of cache.
    """
    step = max(1, len(w))
    if w.device.type == "cpu":
        step = max(1, _CACHED * torch.get_num_threads() // max(1, w.shape[1]))
    return [slice(a, a + step) for a in range(0, len(w), step)]


def _row_parts(w: Tensor, fmt: Format) -> Iterator[tuple[slice, Tensor]]:
    """The rows of `w` in parts, each as float32 in one buffer; all at once if one scale is that of the matrix."""
    chunks = [slice(None)] if fmt.group == 0 else row_chunks(w)
    buffer = torch.empty_like(w[chunks[0]], dtype=torch.float32, memory_format=torch.contiguous_format)
    for rows in chunks:
        yield rows, buffer[: len(w[rows])].copy_(w[rows])


def round_to_codes(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format, *, out: Tensor | None = None
) -> Tensor:
    """Codes of `x` as float32, one for each element; `scale` and `zero_point` are float32 and broadcast against `x`.

    `out`: float32 tensor that takes the codes; it may be `x`.
    """
    # divides, as engines do: multiplying by the reciprocal rounds some halves the other way
    x = torch.div(x, scale, out=out)
    if zero_point is not None:
        x.add_(zero_point)
    return to_codes(x, fmt)


def to_codes(x: Tensor, fmt: Format) -> Tensor:
    """Round float32 `x`, in units of the scale and with the zero point at 0, to the nearest codes, in place; returns `x`."""
    if fmt.fp4:
        return _fp4.round_fp4(x)
    if fmt.kind == "float":
        return widened(x.clamp_(fmt.qmin, fmt.qmax).to(FLOAT8), out=x)  # beyond 448 the conversion gives NaN
    return x.round_().clamp_(fmt.qmin, fmt.qmax)  # halves to even


def decode(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """The values that float32 `codes` represent; the inverse of `round_to_codes` up to rounding."""
    return codes * scale if zero_point is None else (codes - zero_point) * scale


def remainder(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *, out: Tensor | None = None
) -> Tensor:
    """`x` minus the values that its float32 `codes` represent; `out`: result tensor, may be `x`."""
    return torch.addcmul(x, codes if zero_point is None else codes - zero_point, scale, value=-1, out=out)


def weight_codes(w: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """Codes `[out, in]` of `w [out, in]` in `fmt.dtype`, with scale and zero point from `find_params`."""
    q = torch.empty_like(w, dtype=fmt.dtype, memory_format=torch.contiguous_format)
    for rows, part in _row_parts(w, fmt):
        pieces, (spread, zeros) = _pieces(part, fmt), _spread(scale, zero_point, rows)
        if fmt.dtype == FLOAT8 and not fmt.fp4:  # storing rounds
            pieces.div_(spread).clamp_(fmt.qmin, fmt.qmax)
        else:
            round_to_codes(pieces, spread, zeros, fmt, out=pieces)
        q[rows] = part
    return q


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """Float32 values `[out, in]` of the codes `q [out, in]`. `scale`, `zero_point`: as from `find_params`; for blocks of rows,
    those of each row, `[out, in / group]`."""
    w = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    for part in row_chunks(q):
        if fmt.rows > 1:
            blocks = scale[part].float().repeat_interleave(fmt.group, 1)[:, : q.shape[1]]
            widened(q[part], out=w[part]).mul_(blocks)
            continue
        spread, zeros = _spread(scale, zero_point, part)
        pieces = _pieces(widened(q[part], out=w[part]), fmt)
        (pieces if zeros is None else pieces.sub_(zeros)).mul_(spread)
    return w


def fake_quantize(w: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """`dequantize(quantize(w))` in float32 `[out, in]`, without going through the storage dtype."""
    rounded = torch.empty_like(w, dtype=torch.float32, memory_format=torch.contiguous_format)
    for rows in row_chunks(w):
        spread, zeros = _spread(scale, zero_point, rows)
        part = round_to_codes(_pieces(w[rows].float(), fmt), spread, zeros, fmt, out=_pieces(rounded[rows], fmt))
        (part if zeros is None else part.sub_(zeros)).mul_(spread)
    return rounded


def residual(w: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """`w - fake_quantize(w)`, the rounding residual of `w [out, in]`; float32."""
    rest = torch.empty_like(w, dtype=torch.float32, memory_format=torch.contiguous_format)
    for rows in row_chunks(w):
        pieces, (spread, zeros) = _pieces(w[rows].float(), fmt), _spread(scale, zero_point, rows)
        part = round_to_codes(pieces, spread, zeros, fmt, out=_pieces(rest[rows], fmt))
        remainder(pieces, part if zeros is None else part.sub_(zeros), spread, None, out=part)
    return rest


def _pieces(w: Tensor, fmt: Format) -> Tensor:
    """View `[out, in]` as `[out, n_groups, group]`, where the last dimension shares a scale; `[1, 1, out * in]` per matrix."""
    if fmt.group == 0:
        return w.reshape(1, 1, -1)
    return w.reshape(w.shape[0], fmt.n_groups(w.shape[1]), -1)


def _of(importance: Tensor | None, rows: slice) -> Tensor | None:
    """The part of an importance `[in]` or `[out, in]` that belongs to `rows`."""
    return importance[rows] if importance is not None and importance.dim() == 2 and len(importance) > 1 else importance


def _counts(importance: Tensor, w: Tensor, fmt: Format) -> Tensor:
    """View an importance `[in]` or `[out, in]` so that it broadcasts against `_pieces(w)`."""
    return _pieces(importance.expand(w.shape) if fmt.group == 0 else importance.view(-1, w.shape[1]), fmt)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 scale to the stored `dtype`, finite and positive."""
    scale = scale.clamp(max=torch.finfo(dtype).max).to(dtype)  # large scales would become Inf in float16
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale)


def _spread(scale: Tensor, zero_point: Tensor | None, rows: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of some rows in float32, shaped to broadcast against `_pieces`."""
    if scale.dim() > 1:  # not per matrix
        scale, zero_point = scale[rows], None if zero_point is None else zero_point[rows]
    return scale.float().unsqueeze(-1), None if zero_point is None else zero_point.float().unsqueeze(-1)


def widened(codes: Tensor, *, out: Tensor) -> Tensor:
    """Copy `codes`, int8 or float8_e4m3fn, into the float32 tensor `out` of their shape and return it; NaN stays NaN.

    torch 2.13 converts a float8 on a CPU in 6 ns, this in half of one.
    """
    odd = any(count % 2 for count in (codes.storage_offset(), out.storage_offset(), codes.numel()))
    contiguous = codes.is_contiguous() and out.is_contiguous()
    if codes.dtype != FLOAT8 or codes.device.type != "cpu" or odd or not contiguous:
        return out.copy_(codes)
    # Two neighbours are an index, and their two float32 are an int64.
    pairs = codes.view(-1).view(torch.uint16).to(torch.int32)
    torch.index_select(_pairs(), 0, pairs, out=out.view(-1).view(torch.int64))
    return out


@functools.cache
def _pairs() -> Tensor:
    """The values of all pairs of float8, the first of two in the lower byte of the index: int64 `[65536]`."""
    values = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    return torch.stack((values.repeat(256), values.repeat_interleave(256)), -1).flatten().view(torch.int64)

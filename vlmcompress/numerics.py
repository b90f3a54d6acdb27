"""Number formats of weights and the only quantization arithmetic in the project: find a scale, round, undo.

A weight `W [out, in]` is cut into groups along `in` (`group` > 0), rows (`group` = -1) or not at all (`group` = 0).
Each piece has one scale `s` and, when asymmetric, one zero point `z`:

    q = clamp(round(W / s + z), qmin, qmax)        W ~ (q - z) * s

Conventions, the same as compressed-tensors 0.19 (a test holds us to it), so that an exporter only packs bits:

* Integers are signed, `qmin = -2^(b-1)`, `qmax = 2^(b-1) - 1`, for symmetric *and* asymmetric formats; `q` and `z`
  are int8. Formats that store unsigned codes add `2^(b-1)` to both.
* Symmetric: `s = max|W| / qmax`, or `max|W| / (qmax + 1/2)`, whose step is finer and whose largest value lands half a step
  outside and is clamped: whichever errs less, for each scale by itself. compressed-tensors takes the second (`edge`), engines
  any. `z` is None.
* Asymmetric: `s = (max - min) / (2^b - 1)` over a range widened to hold 0, `z = round(qmin - min / s)`, so 0 stays
  exact.
* float8_e4m3fn: `s = max|W| / 448`, `q` is a float8 tensor.
* The scale is rounded to the dtype it will be stored in *before* anything is rounded with it, so what a solver
  optimizes is what an engine computes. A scale of zero (all-zero group, or underflow) becomes that dtype's epsilon.

All arithmetic is float32 whatever the dtype of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
_CACHED = 1 << 16  # elements of a tensor of which a few fit into a core's cache


@dataclass(frozen=True)
class Format:
    """How a weight matrix `[out, in]` is stored.

    Args:
        kind: "int" (signed, 2 to 8 bits) or "float" (float8_e4m3fn).
        bits: bits per weight.
        group: columns that share a scale; -1 is one scale per output row, 0 one scale per matrix.
        symmetric: no zero point.
    """

    kind: Literal["int", "float"]
    bits: int
    group: int
    symmetric: bool = True

    def __post_init__(self) -> None:
        _check_kind(self.kind, self.bits)
        if type(self.group) is not int or self.group < -1:
            raise ValueError(f"group_size must be positive, -1 (per row) or 0 (per matrix), got {self.group!r}")
        if not isinstance(self.symmetric, bool):
            raise ValueError(f"symmetric must be true or false, got {self.symmetric!r}")
        if self.kind == "float" and not self.symmetric:
            raise ValueError("float8 has no zero point: symmetric must be true")

    @cached_property
    def qmin(self) -> float:
        """Smallest code."""
        return float(-(2 ** (self.bits - 1))) if self.kind == "int" else -FLOAT8_MAX

    @cached_property
    def qmax(self) -> float:
        """Largest code."""
        return float(2 ** (self.bits - 1) - 1) if self.kind == "int" else FLOAT8_MAX

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that codes are kept in before an exporter packs them."""
        return torch.int8 if self.kind == "int" else FLOAT8

    def n_groups(self, columns: int) -> int:
        """Number of scales per row of a matrix of `columns` columns. Raises ValueError if the group size does not divide it."""
        if self.group <= 0:
            return 1
        if columns % self.group:
            raise ValueError(
                f"group size {self.group} does not divide {columns} input features; "
                f"choose a group_size that does (-1 always does), or skip the layer"
            )
        return columns // self.group


@dataclass(frozen=True)
class ActFormat:
    """Format of a linear layer's input as an engine quantizes it: a scale per token (dynamic) or one fixed scale (static)."""

    kind: Literal["int", "float"]
    bits: int
    dynamic: bool

    def __post_init__(self) -> None:
        _check_kind(self.kind, self.bits)


@dataclass(frozen=True)
class Scheme:
    """The format of the weights and, unless they stay in 16 bits, of the activations."""

    weights: Format
    activations: ActFormat | None = None


def weight_only(bits: int, group_size: int, symmetric: bool = True) -> Scheme:
    """Integer weights, 16-bit activations. Engines have kernels for groups and rows, none for one scale per matrix."""
    if group_size == 0:
        raise ValueError("group_size must be a positive number or -1 (one scale per row), got 0")
    return Scheme(Format("int", bits, group_size, symmetric))


@dataclass(frozen=True)
class QTensor:
    """A quantized weight matrix.

    Args:
        q: `[out, in]` codes, int8 or float8_e4m3fn.
        scale: `[out, n_groups]`; `[out, 1]` per row; `[1]` per matrix. In the dtype it is stored in.
        zero_point: int8, shaped like `scale`; None when symmetric.
        format: what the codes mean.
    """

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    format: Format

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weights `[out, in]` that an engine computes with."""
        return dequantize(self.q, self.scale, self.zero_point, self.format).to(dtype)


def find_params(
    w: Tensor,
    fmt: Format,
    *,
    scale_dtype: torch.dtype = torch.float32,
    ratio: float | Tensor = 1.0,
    importance: Tensor | None = None,
    edge: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point that cover `ratio` of the range of each piece of `w`.

    Args:
        w: `[out, in]`, any float dtype.
        fmt: the format to fit.
        scale_dtype: dtype the scale is stored in.
        ratio: at most 1; less clips the largest values for a finer step. A number, or a tensor shaped like the scale.
        importance: weight of a squared error in each column, at least 0: `[in]` (the diagonal of a Gram matrix), or
            `[out, in]`; None: all alike. Columns of weight 0 widen no range, unless all of a piece have it.
        edge: the code at which the largest magnitude of a symmetric integer piece is put; None: `qmax` or `qmax + 1/2`,
            by the error of rounding to nearest.

    Returns:
        scale `[out, n_groups]` (`[1]` per matrix) in `scale_dtype`, and the int8 zero point of that shape, or None.
    """
    low, high = find_ranges(w, fmt, importance)
    return fit(w, low.mul_(ratio), high.mul_(ratio), fmt, scale_dtype=scale_dtype, importance=importance, edge=edge)


def find_ranges(w: Tensor, fmt: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Least and largest value of each piece of `w`, widened to hold 0: float32, shaped like the scale; see `find_params`."""
    every = [slice(None)] if fmt.group == 0 else row_chunks(w)
    if importance is not None and importance.amin() > 0:
        importance = None
    parts = [_ranges(w[rows].float(), fmt, _of(importance, rows)) for rows in every]
    low, high = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    if not torch.stack((low.amin(), high.amax())).isfinite().all():
        raise ValueError("the weight holds NaN or Inf; check that the checkpoint is whole")
    return low, high


def fit(
    w: Tensor,
    low: Tensor,
    high: Tensor,
    fmt: Format,
    *,
    scale_dtype: torch.dtype = torch.float32,
    importance: Tensor | None = None,
    edge: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What `find_params` returns, for pieces of `w` that are to cover `low` to `high`, as of `find_ranges`."""
    if not fmt.symmetric:
        scale = _stored((high - low) / (fmt.qmax - fmt.qmin), scale_dtype)
        zero = (fmt.qmin - low / scale.float()).round_().clamp_(fmt.qmin, fmt.qmax)
        return scale, zero.to(torch.int8)
    top = torch.maximum(-low, high)
    if fmt.kind == "float" or edge is not None:
        return _stored(top / (edge or fmt.qmax), scale_dtype), None
    wide, narrow = _stored(top / (fmt.qmax + 0.5), scale_dtype), _stored(top / fmt.qmax, scale_dtype)
    every = [slice(None)] if fmt.group == 0 else row_chunks(w)
    found = [_less_error(w[rows].float(), wide[rows], narrow[rows], _of(importance, rows), fmt) for rows in every]
    return torch.cat(found), None


def row_chunks(w: Tensor) -> list[slice]:
    """Split the rows of `w [out, in]` so that a few float32 temporaries of a part stay in a CPU's cache; elsewhere not at all.

    Arithmetic on weights is a chain of cheap passes, and passes through memory take several times as long.
    """
    step = max(1, len(w))
    if w.device.type == "cpu":
        step = max(1, _CACHED * torch.get_num_threads() // max(1, w.shape[1]))
    return [slice(a, a + step) for a in range(0, len(w), step)]


def encode(x: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format, *, out: Tensor | None = None) -> Tensor:
    """Codes of `x` as float32, one for each element; `scale` and `zero_point` are float32 and broadcast against `x`.

    `out`: float32 tensor that takes the codes; it may be `x`.
    """
    x = torch.div(x, scale, out=out)
    if zero_point is not None:
        x.add_(zero_point)
    if fmt.kind == "float":
        return x.copy_(x.clamp_(fmt.qmin, fmt.qmax).to(FLOAT8))
    return x.round_().clamp_(fmt.qmin, fmt.qmax)


def decode(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """The values that float32 `codes` stand for; the inverse of `encode` up to rounding."""
    return codes * scale if zero_point is None else (codes - zero_point) * scale


def leftover(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *, out: Tensor | None = None
) -> Tensor:
    """What remains of `x` without the values that its float32 `codes` stand for; `out`: where to put it, may be `x`."""
    return torch.addcmul(x, codes if zero_point is None else codes - zero_point, scale, value=-1, out=out)


def quantize(w: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """Codes `[out, in]` of `w [out, in]` in `fmt.dtype`, given parameters from `find_params`."""
    q = torch.empty_like(w, dtype=fmt.dtype, memory_format=torch.contiguous_format)
    for rows in row_chunks(w):
        q[rows] = encode(_pieces(w[rows].float(), fmt), *_spread(scale, zero_point, rows), fmt).view_as(q[rows])
    return q


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """Float32 values `[out, in]` of the codes `q [out, in]`."""
    w = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    for rows in row_chunks(q):
        spread, zeros = _spread(scale, zero_point, rows)
        part = _pieces(w[rows].copy_(q[rows]), fmt)
        (part if zeros is None else part.sub_(zeros)).mul_(spread)
    return w


def fake_quantize(w: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """`dequantize(quantize(w))` in float32 `[out, in]`, without going through the storage dtype."""
    found = torch.empty_like(w, dtype=torch.float32, memory_format=torch.contiguous_format)
    for rows in row_chunks(w):
        spread, zeros = _spread(scale, zero_point, rows)
        part = encode(_pieces(w[rows].float(), fmt), spread, zeros, fmt, out=_pieces(found[rows], fmt))
        (part if zeros is None else part.sub_(zeros)).mul_(spread)
    return found


def residual(w: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """`w - fake_quantize(w)`, what rounding takes away from `w [out, in]`; float32."""
    found = torch.empty_like(w, dtype=torch.float32, memory_format=torch.contiguous_format)
    for rows in row_chunks(w):
        pieces, (spread, zeros) = _pieces(w[rows].float(), fmt), _spread(scale, zero_point, rows)
        part = encode(pieces, spread, zeros, fmt, out=_pieces(found[rows], fmt))
        leftover(pieces, part if zeros is None else part.sub_(zeros), spread, None, out=part)
    return found


def round_to_nearest(
    w: Tensor,
    fmt: Format,
    *,
    scale_dtype: torch.dtype = torch.float32,
    ratio: float | Tensor = 1.0,
    importance: Tensor | None = None,
) -> QTensor:
    """Quantize `w [out, in]` to `fmt`, each element rounded to the nearest code; the other arguments are `find_params`'s."""
    params = find_params(w, fmt, scale_dtype=scale_dtype, ratio=ratio, importance=importance)
    return quantize_with(w, *params, fmt)


def quantize_with(w: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> QTensor:
    """Quantize `w [out, in]` to the nearest codes, with a scale and zero point already chosen."""
    return QTensor(quantize(w, scale, zero_point, fmt), scale, zero_point, fmt)


def round_activations(x: Tensor, fmt: ActFormat, scale: Tensor | None = None) -> Tensor:
    """Round `x [tokens, in]` as an engine does, float32. `scale`: of static activations; None: each token has its own."""
    x, top = x.float(), FLOAT8_MAX if fmt.kind == "float" else 2.0 ** (fmt.bits - 1) - 1
    if scale is None:
        scale = (x.abs().amax(-1, keepdim=True) / top).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (x / scale.float()).clamp_(-top, top)
    return (codes.to(FLOAT8).float() if fmt.kind == "float" else codes.round_()) * scale.float()


def _check_kind(kind: str, bits: int) -> None:
    if kind not in ("int", "float"):
        raise ValueError(f"kind must be 'int' or 'float', got {kind!r}")
    if kind == "int" and (type(bits) is not int or not 2 <= bits <= 8):
        raise ValueError(f"bits must be a whole number from 2 to 8, got {bits!r}")
    if kind == "float" and bits != 8:
        raise ValueError(f"bits must be 8 for a float format, got {bits!r}")


def _pieces(w: Tensor, fmt: Format) -> Tensor:
    """View `[out, in]` as `[out, n_groups, group]`, the last dimension sharing a scale; `[1, 1, out * in]` per matrix."""
    if fmt.group == 0:
        return w.reshape(1, 1, -1)
    return w.reshape(w.shape[0], fmt.n_groups(w.shape[1]), -1)


def _of(importance: Tensor | None, rows: slice) -> Tensor | None:
    """The part of weights `[in]` or `[out, in]` that concerns `rows`."""
    return importance[rows] if importance is not None and importance.dim() == 2 and len(importance) > 1 else importance


def _counts(importance: Tensor, w: Tensor, fmt: Format) -> Tensor:
    """View weights `[in]` or `[out, in]` so that they broadcast against the pieces of `w`."""
    return _pieces(importance.expand(w.shape) if fmt.group == 0 else importance.view(-1, w.shape[1]), fmt)


def _ranges(w: Tensor, fmt: Format, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `find_ranges` at once, without its check."""
    pieces = _pieces(w, fmt)
    if importance is not None:
        dead = _counts(importance, w, fmt) == 0
        pieces = pieces.masked_fill(dead & ~dead.all(-1, keepdim=True), 0)
    low, high = pieces.amin(-1).clamp_(max=0), pieces.amax(-1).clamp_(min=0)
    return (low.view(1), high.view(1)) if fmt.group == 0 else (low, high)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 scale to the dtype that it is stored in, finite and above zero."""
    scale = scale.clamp(max=torch.finfo(dtype).max).to(dtype)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale)


def _less_error(w: Tensor, first: Tensor, second: Tensor, importance: Tensor | None, fmt: Format) -> Tensor:
    """Take, piece by piece, from two scales the one of smaller squared error; the first where equal."""
    pieces, errors = _pieces(w, fmt), []
    d = torch.empty_like(pieces)
    for scale in (first, second):
        spread, _ = _spread(scale, None)
        leftover(pieces, encode(pieces, spread, None, fmt, out=d), spread, None, out=d).square_()
        errors.append((d if importance is None else d.mul_(_counts(importance, w, fmt))).sum(-1).view_as(first))
    return torch.where(errors[1] < errors[0], second, first)


def _spread(scale: Tensor, zero_point: Tensor | None, rows: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of some rows in float32, shaped to broadcast against `_pieces`."""
    if scale.dim() > 1:  # not per matrix
        scale, zero_point = scale[rows], None if zero_point is None else zero_point[rows]
    return scale.float().unsqueeze(-1), None if zero_point is None else zero_point.float().unsqueeze(-1)

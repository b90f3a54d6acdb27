"""Statistics of the input `X [tokens, in]` of a group of linear layers, per modality (`statistics.collect` computes them).

A weight change `dW` changes the output by `X dW^T`, whose squared size needs no `X` once `G = X^T X` is known:

    ||X dW^T||^2 = tr(dW G dW^T)

so one pass of forward computation serves GPTQ, AWQ's search, clipping, per-modality error reports and any later
weighting of modalities. `G` costs `tokens * in^2` multiply-adds and `4 * in^2` bytes for each modality that occurs;
absolute maxima and means cost next to nothing, so a method declares what it `needs`. A few rows of X are kept along with the
maxima, for schemes that round activations: the effect of that rounding cannot be derived from sums. Only the block upper
triangle of `G` is computed (the rest follows by symmetry). Of a modality with fewer than `ROWS` rows these are kept instead of
`G`: they take less memory, a sum over modalities needs no matrix for each, and errors follow from them directly.

With a balance (`statistics.balance`) modality m has the share `p_m` of the total, independent of its number of tokens `n_m`:

    G = N sum_m p_m G_m / n_m        mean|X| = sum_m p_m mean|X_m|        max|X| = sum_m p_m max|X_m|

The mean in AWQ's scales is weighted like the losses, so that candidates and losses weight tokens alike (MBQ keeps the mean
pooled). A maximum does not depend on token counts, and a pooled one belongs to a single modality. No paper weights maxima; the
weighted mean is our choice. Where modality m holds the pooled maximum, the mean is at least `p_m` of it, so SmoothQuant leaves
its channel at most `p_m^-alpha` times larger. No method depends on an overall factor; `N` keeps G as large as the pooled one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import row_chunks
from vlmcompress.numerics.statistics.balance import MODALITIES, Sensitivity, shares

SAMPLE = 64  # rows kept of each modality
ROWS = 2048  # rows of a modality multiplied at a time
STATISTICS = frozenset({"gram", "absmax", "absmean"})  # what can be collected
_LARGE = 2048  # columns of G computed at a time on an accelerator, where small products cost mostly their launch
_BLOCK = 256  # columns of G computed at a time on a CPU; measured: skips almost half the work and still suits BLAS


class GroupStats:
    """Statistics of the inputs of linear layers that share one input.

    Args:
        width: input features `in`.
        needs: which statistics to keep, a subset of `STATISTICS`.
    """

    def __init__(self, width: int, needs: Iterable[str] = ("gram",)):
        self.width = width
        self.needs = frozenset(needs)
        if unknown := self.needs - STATISTICS:
            raise ValueError(f"unknown statistics {sorted(unknown)}; known are {sorted(STATISTICS)}")
        self.count: dict[str, int] = dict.fromkeys(MODALITIES, 0)
        self._gram: dict[str, Tensor] = {}  # [in, in], block upper triangle valid
        self._pending: dict[str, Tensor] = {}  # [at most ROWS, in], X of modalities without this sum
        self._absmax: dict[str, Tensor] = {}  # [in]
        self._abssum: dict[str, Tensor] = {}  # [in]
        self._rows: dict[str, Tensor] = {}  # [at most SAMPLE, in]
        self._scale: Tensor | None = None  # [in]; stored values are of X, reported ones of X / scale
        self._shares: dict[str, float] | None = None  # p_m of a balance; None pools all tokens
        self.routed = False  # whether the layers belong to an expert, which sees only some of the tokens
        self.borrowed = 0  # number of an expert's tokens that the router did not send to it
        self._merged: Tensor | None = None  # [in, in], cached result of `gram` before scaling, see `merged`
        self.sensitivity: Sensitivity | None = None  # sensitivity of the group's output, set by the caller
        self.held_out: GroupStats | None = None  # of inputs that no weight is fitted to; set by the caller

    def gram(self, weights: Mapping[str, float] | None = None) -> Tensor:
        """The Gram matrix `sum_m w_m X_m^T X_m`, float32 `[in, in]`, summed over tokens.

        `weights` by modality; None: 1, or those of the balance. Raises ValueError if it holds NaN or Inf.
        """
        if self._merged is not None and weights is None:
            # (X / s)^T (X / s) = diag(1/s) G diag(1/s)
            return self._merged if self._scale is None else (self._merged / self._scale).div_(self._scale[:, None])
        total = _finite(_mirror(self._sum(self._weighed(weights))))
        return total if self._scale is None else total.div_(self._scale).div_(self._scale[:, None])

    def importance(self) -> Tensor | None:
        """The diagonal of `gram()`, float32 `[in]`, without computing the matrix; None if no Gram matrix was collected."""
        if "gram" not in self.needs:
            return None
        weighed = self._weighed(None)
        parts = [self._gram[name].diagonal() * weight for name, weight in weighed.items() if name in self._gram]
        for name in weighed.keys() & self._pending.keys():
            parts += [p.float().square().sum(0).mul_(weighed[name]) for p in self._pending[name].split(_BLOCK)]
        return _finite(self._divided(self._divided(torch.stack(parts).sum(0))))

    def merged(self) -> GroupStats:
        """A copy that computes the sum in `gram` only once; its result must not be modified. Call it before `rescaled`."""
        return self._with(_merged=self.gram())

    @property
    def tokens(self) -> int:
        """Number of tokens that `gram` sums over, an upper bound of its rank."""
        return sum(self.count[name] for name in (self._shares or self.count))

    def absmax(self) -> Tensor:
        """The maxima `max_t |x_t|` over all tokens, float32 `[in]`; balanced: the weighted mean of the modalities' maxima."""
        maxima = self._seen(self._absmax, "absmax")
        if self._shares is None:
            return self._divided(torch.stack(list(maxima.values())).amax(0))
        return self._divided(sum((p * maxima[m] for m, p in self._shares.items()), torch.zeros(())))

    def owners(self) -> dict[str, float]:
        """Modality -> share of input channels whose maximum it holds, for modalities that occur."""
        maxima = self._seen(self._absmax, "absmax")
        counts = torch.stack(list(maxima.values())).argmax(0).bincount(minlength=len(maxima))
        return dict(zip(maxima, (counts / self.width).tolist(), strict=True))

    def sample(self) -> dict[str, Tensor]:
        """Modality -> at most `SAMPLE` rows of the input, float32 `[rows, in]`, drawn uniformly; empty without `absmax`."""
        sampled = {name: self._rows[name].bfloat16() for name in MODALITIES if name in self._rows}
        return {name: self._divided(rows.float()) for name, rows in sampled.items()}  # files store bfloat16

    def absmean(self) -> Tensor:
        """The means `mean_t |x_t|` over all tokens, float32 `[in]`; balanced: the weighted mean of the modalities' means."""
        sums = self._seen(self._abssum, "absmean")
        if self._shares is None:
            return self._divided(torch.stack(list(sums.values())).sum(0) / sum(self.count.values()))
        return self._divided(sum((p / self.count[m] * sums[m] for m, p in self._shares.items()), torch.zeros(())))

    def balanced(self, balance: Any) -> GroupStats:
        """Statistics with the modalities weighted by `balance` (see the module); with `off` every token counts the same.

        Errors by modality do not change, and the Gram matrices are shared with `self`. Raises ValueError if a modality with a
        share did not occur, or if the balance needs gradients that are missing.
        """
        balanced_shares = shares(balance, self.count, self.sensitivity, partial=self.routed)
        if balanced_shares == self._shares:
            return self
        return self._with(_shares=balanced_shares, _merged=None)

    def rescaled(self, s: Tensor) -> GroupStats:
        """The statistics of `X / s` for `s [in]`, in closed form; Gram matrices are shared. Raises ValueError unless all s >
        0."""
        s = s.float()
        if not (s.isfinite().all() and (s > 0).all()):
            raise ValueError("smoothing scales must be positive and finite")
        return self._with(_scale=s if self._scale is None else self._scale * s)

    @property
    def scale(self) -> Tensor | None:
        """The product `[in]` of the scales of all `rescaled` calls; None if there was none."""
        return self._scale

    def error(self, dw: Tensor, w: Tensor) -> dict[str, float]:
        """Relative output error `||X_m dW^T||^2 / ||X_m W^T||^2` by modality; `dw` and `w` are `[out, in]`."""
        changes, names = [self._divided(dw), self._divided(w)], list(self._occurring())
        totals = torch.zeros(2, len(names), dtype=torch.float64, device=dw.device)
        if summed := [index for index, name in enumerate(names) if name in self._gram]:
            totals[:, summed] = _traces(changes, [self._gram[names[index]] for index in summed])
        if pending := [index for index, name in enumerate(names) if name in self._pending]:
            both = torch.cat(changes).T
            for index in pending:
                outputs = self._pending[names[index]].float() @ both
                sizes = [output.square().sum(dtype=torch.float64) for output in outputs.split([len(dw), len(w)], 1)]
                totals[:, index] += torch.stack(sizes)
        return {
            name: error / size if size > 0 else 0.0 for name, error, size in zip(names, *totals.tolist(), strict=True)
        }

    @property
    def measured(self) -> GroupStats:
        """The statistics that errors are measured on, of inputs divided like these: the held-out ones if there are any."""
        return self if self.held_out is None else self.held_out._with(_scale=self._scale)

    @classmethod
    def of_rows(cls, rows: Mapping[str, Tensor]) -> GroupStats:
        """Statistics for measuring errors on `rows`: modality -> `[at most ROWS, in]`, any float dtype."""
        stats = cls(next(iter(rows.values())).shape[1], {"gram", "absmax"})
        stats._pending = dict(rows)
        stats._rows = {name: kept[:: -(-len(kept) // SAMPLE)] for name, kept in rows.items()}
        return stats

    def rounding_error(self, q: Tensor, w: Tensor, rounded: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Error that rounding inputs adds to `error`: `||(r(X_m) - X_m) Q^T||^2 / ||X_m W^T||^2` by modality, over the sample
        of rows. `q` and `w` are `[out, in]`; `rounded` is the function `r`, applied to rows of the rescaled input."""
        errors = {}
        for name, x in self.sample().items():  # [rows, in]
            size = float((x @ w.float().T).square().sum())
            errors[name] = float(((rounded(x) - x) @ q.float().T).square().sum()) / size if size > 0 else 0.0
        return errors

    def _weighed(self, weights: Mapping[str, float] | None) -> dict[str, float]:
        """Factor of each modality's Gram matrix, without zeros; `weights` None: 1, or the factors of the balance."""
        if weights is None and self._shares is not None:  # w_m = N p_m / n_m
            weights = {m: p * sum(self.count.values()) / self.count[m] for m, p in self._shares.items()}
        names = self._occurring()
        if weights is None:
            return dict.fromkeys(names, 1.0)
        if unknown := set(weights) - set(MODALITIES):
            raise ValueError(f"unknown modalities {sorted(unknown)}; known are {', '.join(MODALITIES)}")
        chosen = {name: weights.get(name, 0.0) for name in names}
        if not any(chosen.values()):
            raise ValueError(f"every modality that occurs ({', '.join(names)}) has weight 0")
        return {name: weight for name, weight in chosen.items() if weight}

    def _occurring(self) -> Iterable[str]:
        """The modalities that occur, where Gram matrices are collected."""
        return self._seen({**self._pending, **self._gram}, "gram")

    @property
    def device(self) -> torch.device:
        """The device of the Gram matrices."""
        return next(iter((self._gram or self._pending).values())).device

    def _sum(self, weights: Mapping[str, float]) -> Tensor:
        """The block upper triangle of `sum_m w_m X_m^T X_m`, float32 `[in, in]`."""
        total = torch.empty(self.width, self.width, device=self.device)
        for number, (name, weight) in enumerate(weights.items()):
            if name in self._pending:
                add_product(total, self._pending[name], weight, fresh=not number)
                continue
            for a, b in _blocks(self.width):  # below these rows of the block upper triangle a CPU has mapped no memory
                rows = self._gram[name][a:b, a:]
                if number:
                    total[a:b, a:].add_(rows, alpha=weight)
                else:
                    torch.mul(rows, weight, out=total[a:b, a:])
        return total

    def _with(self, **changes: Any) -> GroupStats:
        new = copy.copy(self)
        new.__dict__.update(changes)
        return new

    def _divided(self, x: Tensor) -> Tensor:
        """Divide `x [..., in]` by the scale of `rescaled`, if there is one."""
        return x if self._scale is None else x / self._scale

    def _seen(self, values: dict[str, Tensor], need: str) -> dict[str, Tensor]:
        if need not in self.needs:
            raise ValueError(f"'{need}' was not collected; name it in `needs`")
        if not values:
            raise ValueError("no calibration token reached this layer; add calibration samples")
        # fixed order, so that sums are reproducible
        return {name: values[name] for name in MODALITIES if name in values}


def quadratic(d: Tensor, gram: Tensor) -> Tensor:
    """Compute `d_i G d_i^T` for each row of `d [rows, in]`: float32 `[rows]`. Their sum is `tr(d G d^T)`.

    Reads only the block upper triangle of the symmetric `gram [in, in]`, which halves the arithmetic.
    """
    d = d.float()
    total = d.new_zeros(d.shape[0])
    for a, b in _blocks(d.shape[1]):
        # d_b G_bb d_b^T + 2 d_<b G_<b,b d_b^T: off-diagonal blocks count twice, as the lower triangle is not read.
        product = d[:, a:b] @ gram[a:b, a:b]
        if a:
            product.addmm_(d[:, :a], gram[:a, a:b], alpha=2)
        total += torch.linalg.vecdot(product, d[:, a:b])
    return total


def _traces(changes: list[Tensor], grams: list[Tensor]) -> Tensor:
    """Compute `tr(d G d^T)` for each `d [rows, in]` of `changes` and each G of `grams`: float64 `[changes, grams]`.

    Computed as the sum of the entries of `d^T d` times G: `d^T d` is the expensive part, and all G share it. Like `quadratic`
    it reads only block upper triangles.
    """
    total = torch.zeros(len(changes), len(grams), dtype=torch.float64, device=grams[0].device)
    for a, b in _blocks(len(grams[0])):
        for first, last, factor in ((0, a, 2), (a, b, 1)):
            for rows in row_chunks(grams[0][first:last, a:b]):
                # tr(d G d^T) = sum of the entries of (d^T d) * G: parts in float32 that stay in cache, summed in float64.
                products = torch.stack([d[:, first:last][:, rows].T @ d[:, a:b] for d in changes])
                parts = [(products * gram[first:last, a:b][rows]).sum((1, 2)) for gram in grams]
                total.add_(torch.stack(parts, 1), alpha=factor)
    return total


def _blocks(width: int) -> list[tuple[int, int]]:
    return [(a, min(a + _BLOCK, width)) for a in range(0, width, _BLOCK)]


def add_product(gram: Tensor, rows: Tensor, weight: float = 1.0, *, fresh: bool = False) -> None:
    """Add `weight rows^T rows` to the block upper triangle of `gram [in, in]`, in place.

    Args:
        rows: `[tokens, in]`, any float dtype.
        fresh: `gram` has no values yet.
    """
    with _factors(rows) as factors:
        _add_triangle(gram, factors, weight, 0, len(gram), fresh)


def _add_triangle(gram: Tensor, rows: Tensor, weight: float, start: int, end: int, fresh: bool) -> None:
    """`add_product` for columns `start` to `end`, halved recursively, which makes the products as large as possible."""
    block = _multiplied(gram.device)
    blocks = -(-(end - start) // block)
    # the square right of it in one product, then both halves
    middle = start + block * (-(-blocks // 2)) if blocks > 1 else end
    left = rows[:, start:middle]
    column, right = (start, left) if blocks <= 1 else (middle, rows[:, middle:end])
    _add(gram[start:middle, column:end], left, right, weight, fresh)
    if blocks > 1:
        _add_triangle(gram, rows, weight, start, middle, fresh)
        _add_triangle(gram, rows, weight, middle, end, fresh)


def _multiplied(device: torch.device) -> int:
    """Columns of a Gram matrix to compute in one product on `device`."""
    return _BLOCK if device.type == "cpu" else _LARGE


def _add(target: Tensor, left: Tensor, right: Tensor, weight: float, fresh: bool) -> None:
    """Add `weight left^T right` to `target`, or write it there if that is `fresh`.

    The product is rounded before it is weighted, so that a sum is the same whether its terms were stored or not.
    """
    step = 2 * _multiplied(target.device)
    wide: dict[str, Any] = {} if left.dtype == target.dtype else {"out_dtype": target.dtype}
    for columns, rows in zip(left.split(step, 1), target.split(step), strict=True):
        if fresh and not wide:
            torch.mm(columns.T, right, out=rows).mul_(weight)
        elif fresh:
            torch.mul(torch.mm(columns.T, right, **wide), weight, out=rows)
        else:
            rows.add_(torch.mm(columns.T, right, **wide), alpha=weight)


@contextmanager
def _factors(rows: Tensor) -> Iterator[Tensor]:
    """`rows` in a dtype whose products are summed in float32 within the context.

    Rows in bfloat16 lose nothing where float32 factors may be rounded to bfloat16: a CPU with such instructions is then twice
    as fast.
    """
    if rows.dtype == torch.float32 or wide_products(rows.device, rows.dtype):
        yield rows
        return
    before = torch.get_float32_matmul_precision()
    try:
        if rows.dtype == torch.bfloat16:
            torch.set_float32_matmul_precision("medium")
        yield rows.float()
    finally:
        torch.set_float32_matmul_precision(before)


@functools.cache
def wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` multiplies matrices of a 16-bit `dtype` and sums and returns float32."""
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    tiny = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        return bool((torch.mm(tiny, tiny, out_dtype=torch.float32) == 16).all())
    except (RuntimeError, TypeError):
        return False


def _mirror(gram: Tensor) -> Tensor:
    """Fill the lower triangle from the upper one, in place: on a CPU in squares that stay in cache, elsewhere by columns."""
    blocks = _blocks(gram.shape[0])
    for i, (a, b) in enumerate(blocks):
        for c, d in blocks[i + 1 :] if gram.device.type == "cpu" else [(b, gram.shape[0])]:
            gram[c:d, a:b] = gram[a:b, c:d].T
    return gram


def _finite(values: Tensor) -> Tensor:
    """Return `values` if all are finite, else raise ValueError; allocates no tensor of their size."""
    if not torch.stack(torch.aminmax(values)).isfinite().all():
        raise ValueError("the calibration statistics hold NaN or Inf; collect them again")
    return values

"""Local search after rounding: codes and scales that lower the output error further, one at a time.

GPTQ fixes a column once, before it knows what later columns round to. With all codes known, the error of a row

    f(q) = (w - q) G (w - q)^T

is a quadratic in each single code and in each single scale, whose least point is found in closed form. With the errors
`d = w - q` and `p = G d`, half the downward slope, one *sweep* goes through the columns and sets each to the nearest code of

    q_j + p_j / G_jj

while all others stay (cyclic coordinate descent: QuantEase, arXiv 2309.01885, eq. 7; CDQuant, arXiv 2406.17542, takes the best
column in the place of the next). Before the codes of a group its scale is refitted to them: with values `q = s c`, `c` the
codes without zero points,

    s + sum_j c_j p_j / (c G c^T)       over the group's columns

is the best scale, of which the dtype that it is stored in takes the nearest, if that is better than the old one. No step raises
f, so more sweeps are never worse on the statistics that they are given. Rows are independent, and are taken at once.

Cost: `out * in^2` multiply-adds a sweep, twice those of GPTQ's visit. Loses: it ends where no single code or scale can
improve; what two together could, it does not see. It fits the calibration tokens closer than feedback alone does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmcompress.numerics import QTensor, as_stored, decode, encode

_SPAN = 128  # columns whose slopes are computed in one product
_STRIP = 16  # columns within which slopes follow each change one by one


def descend(
    weights: Sequence[Tensor], quantized: Sequence[QTensor], gram: Tensor, sweeps: int, refit: bool = True
) -> list[QTensor]:
    """Lower `tr(dW G dW^T)` of each of `weights [out_i, in]`, starting from them `quantized`.

    Args:
        weights: what was quantized, all with the same input.
        quantized: their quantized matrices, of one format with scales for rows or groups.
        gram: `[in, in]`, symmetric, with no negative eigenvalue.
        sweeps: how often all columns are visited; 0 returns `quantized`.
        refit: whether scales are refitted to their codes, too.
    """
    if not sweeps:
        return list(quantized)
    first, lengths = quantized[0], [len(w) for w in weights]
    search = _Search(weights, quantized, gram)
    for _ in range(sweeps):
        search.sweep(refit)
    codes = search.codes.T.to(first.format.dtype).split(lengths)
    scales = search.scales.T.contiguous().split(lengths)
    return [
        QTensor.of(
            q.contiguous(),
            s if old.global_scale is not None else s.to(old.scale.dtype),
            old.zero_point,
            old.format,
            old.global_scale,
        )
        for q, s, old in zip(codes, scales, quantized, strict=True)
    ]


class _Search:
    """The state of a search, transposed, as columns are visited: `codes`, `errors [in, out]` and `scales [n_groups, out]`."""

    def __init__(self, weights: Sequence[Tensor], quantized: Sequence[QTensor], gram: Tensor):
        self.gram, self.format = gram, quantized[0].format
        self.scale_dtype, self.global_scale = quantized[0].scale.dtype, quantized[0].global_scale
        self.codes = torch.cat([tensor.q.float() for tensor in quantized]).T.contiguous()
        self.scales = torch.cat([tensor.step.float() for tensor in quantized]).T.contiguous()
        zeros = [tensor.zero_point.float() for tensor in quantized if tensor.zero_point is not None]
        self.zeros = torch.cat(zeros).T.contiguous() if zeros else None
        self.errors = torch.cat([w.float() for w in weights]).T.contiguous()
        self.size = len(self.codes) // len(self.scales)  # columns of a group
        for g in range(len(self.scales)):
            columns = slice(g * self.size, (g + 1) * self.size)
            self.errors[columns] -= decode(self.codes[columns], *self._params(g))
        inverse = 1 / gram.diagonal()
        self.inverse = torch.where(inverse.isfinite(), inverse, 0.0)  # columns of no weight stay as they are

    def sweep(self, refit: bool) -> None:
        """Visit all scales and columns once."""
        width, size = len(self.codes), self.size
        step = _SPAN if size > _SPAN else _SPAN // size * size
        if refit and size > _SPAN:
            for a in range(0, width, size):
                self._refit(a, self.gram[a : a + size] @ self.errors)
        for a in range(0, width, step):
            slopes = self.gram[a : a + step] @ self.errors  # [columns of this span, out]
            for c in range(a, a + len(slopes), size) if refit and size <= _SPAN else ():
                changed = self._refit(c, slopes[c - a : c - a + size])
                slopes.addmm_(self.gram[a : a + step, c : c + size], changed)
            for c in range(a, a + len(slopes), _STRIP):
                changed = self._recode(c, slopes[c - a : c - a + _STRIP])
                after = c - a + len(changed)
                slopes[after:].addmm_(self.gram[a + after : a + len(slopes), c : c + len(changed)], changed)

    def _refit(self, a: int, slopes: Tensor) -> Tensor:
        """Refit the scales of the group from column `a` on; returns how its errors change: `[size, out]`, as `slopes`."""
        b, g = a + self.size, a // self.size
        codes = self.codes[a:b] if self.zeros is None else self.codes[a:b] - self.zeros[g]
        slope = (codes * slopes).sum(0)
        bend = (codes * (self.gram[a:b, a:b] @ codes)).sum(0)
        old = self.scales[g]
        target = old + torch.where(bend > 0, slope / bend, 0.0)
        new = as_stored(target, self.format, self.scale_dtype, self.global_scale)
        step = new.float() - old
        better = (target > 0) & (step * (2 * slope - step * bend) > 0)
        self.scales[g] = torch.where(better, new.float(), old)
        return self._change(slice(a, b), codes * torch.where(better, -step, 0.0))

    def _recode(self, a: int, slopes: Tensor) -> Tensor:
        """Choose the codes of the columns from `a` on; returns how their errors change: `[columns, out]`, as `slopes`."""
        b = a + len(slopes)
        block_gram, changed = self.gram[a:b, a:b], torch.zeros_like(slopes)
        for i, (code, slope) in enumerate(zip(self.codes[a:b].unbind(), slopes.unbind(), strict=True)):
            params = self._params((a + i) // self.size)
            old = decode(code, *params)
            slope = torch.addmv(slope, changed[:i].T, block_gram[i, :i])
            encode(torch.addcmul(old, slope, self.inverse[a + i]), *params, self.format, out=code)
            torch.sub(old, decode(code, *params), out=changed[i])
        return self._change(slice(a, b), changed)

    def _change(self, columns: slice, change: Tensor) -> Tensor:
        self.errors[columns] += change
        return change

    def _params(self, group: int) -> tuple[Tensor, Tensor | None]:
        return self.scales[group], None if self.zeros is None else self.zeros[group]

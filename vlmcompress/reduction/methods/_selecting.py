"""Shared by methods that select tokens: options for the kept share and for the other tokens, and greedy selection."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Reduction, ShareReducer, Signals, unit

SWITCH = "VLMCOMPRESS_TRITON"  # 0: use torch only, as in `quantization.schemes._fused`
_FRONT = 8  # columns whose gains are computed first in a step
SIMILAR = 0.6
"""The lowest cosine at which `merge: nearest` merges; chosen on the demo models' validation questions."""


@dataclass(frozen=True)
class SelectingReducer(ShareReducer):
    """A method that chooses tokens.

    keep:    share of the tokens.
    merge: `none`: other tokens are dropped, as in the methods' papers. `nearest`: each is averaged into the chosen token with
        the highest cosine to it if that is at least `SIMILAR`, and dropped otherwise.
    """

    keep: float = 0.5
    merge: Literal["none", "nearest"] = dataclasses.field(default="none", kw_only=True)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge not in ("none", "nearest"):
            raise ValueError(f"merge must be none or nearest, got {str(self.merge)[:40]!r}")

    def selected(self, index: Tensor, signals: Signals) -> Reduction:
        """Keep the tokens `index [m]`, in any order; the others are dropped or merged as the options say."""
        kept = Reduction.keep(index, signals.n)
        if self.merge == "none" or len(kept.anchor) == signals.n:
            return kept
        if signals.features is None:
            raise ValueError("merge=nearest needs signals that are missing: features")
        rows = unit(signals.features)
        # [n, m] cosines of all tokens to the kept ones.
        likeness, nearest = (rows @ rows[kept.anchor].T).max(1)
        parent = torch.where(likeness >= SIMILAR, kept.anchor[nearest], -1)
        # By rounding, a kept token could be nearer to a duplicate than to itself.
        parent[kept.anchor] = kept.anchor
        return Reduction.join(parent, count=len(index))


class _AllImages(torch.autograd.Function):
    """A selection that under `torch.vmap` (see `_run.reduce_all`) gets the tensors of all images, `[images, ...]`, instead of
    being vectorized step by step: thousands of steps would cost the host more time than the GPU."""

    @staticmethod
    @override
    def forward(choose: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return choose(*(x[None] for x in tensors))[0]

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: indices have no gradient."""

    @staticmethod
    @override
    def vmap(info: Any, dims: Any, choose: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, int]:
        return choose(
            *(
                x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
                for x, dim in zip(tensors, dims[1:], strict=True)
            )
        ), 0


def for_all_images(choose: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Run `choose`, which takes and returns tensors `[images, ...]`, on the tensors of one image."""
    return _AllImages.apply(choose, *tensors)


@functools.cache
def kernels(device: torch.device, n: int) -> ModuleType | None:
    """The Triton kernels of greedy choices (`_greedy_kernels`) among `n` tokens; None where torch is used."""
    if device.type != "cuda" or os.environ.get(SWITCH) == "0" or find_spec("triton") is None:
        return None
    from vlmcompress.reduction.methods import _greedy_kernels

    return _greedy_kernels if n <= _greedy_kernels.MOST else None


def cover(scores: Tensor, count: int, covered: Tensor | None = None) -> Tensor:
    """Greedily choose `count` columns of `scores [m, n]` whose rowwise maxima have a large sum; indices in order of
    choice.

    Each step takes the column of largest gain in that sum, of equal ones the lowest index. Maxima start at 0, or at those
    of the columns `covered`, which are not chosen again. On a CPU the choice is made `lazily`, elsewhere `stepwise` or by
    `kernels`; it is the same.
    """
    columns = scores.T.contiguous()  # a column's gain is then a sum along memory, in the same order for equal columns
    best = columns.new_zeros(columns.shape[1])
    used = torch.zeros(len(columns), dtype=torch.bool, device=columns.device)
    if covered is not None and len(covered):
        best, used = columns[covered].amax(0), used.scatter(0, covered, True)

    def choose(columns: Tensor, best: Tensor, used: Tensor) -> Tensor:
        if columns.device.type == "cpu":
            return torch.stack([lazily(*image, count) for image in zip(columns, best, used, strict=True)])
        fused = kernels(columns.device, max(columns.shape[1:]))
        return (fused.cover if fused else stepwise)(columns, best, used, count)

    return for_all_images(choose, columns, best, used)


def stepwise(columns: Tensor, best: Tensor, used: Tensor, count: int) -> Tensor:
    """Choose for `cover`, `[b, count]`, computing all gains in each step, without synchronizing with the device.

    Args:
        columns: `[b, n, m]`, the tables' columns.
        best: `[b, m]`, initial maximum of each row.
        used: `[b, n]`, columns that may not be chosen.
    """
    best, rise = best.clone(), torch.empty_like(columns)
    lost = torch.zeros_like(columns[..., 0]).masked_fill(used, -torch.inf)
    chosen = torch.empty(count, len(columns), 1, dtype=torch.int64, device=columns.device)
    rows = chosen[..., None].expand(-1, -1, -1, best.shape[1])  # the chosen tokens as indices of whole columns
    for token, row in zip(chosen.unbind(), rows.unbind(), strict=True):
        gain = torch.sub(columns, best[:, None], out=rise).clamp_(min=0).sum(2).add_(lost)
        torch.argmax(gain, 1, keepdim=True, out=token)
        torch.maximum(best, columns.gather(1, row)[:, 0], out=best)
        lost.scatter_(1, token, -torch.inf)
    return chosen[..., 0].T


def lazily(columns: Tensor, best: Tensor, used: Tensor, count: int) -> Tensor:
    """Choose for `cover` of one image, recomputing only gains that can be the largest; arguments as in `stepwise`.

    A column's gain never rises while others are chosen, nor does its rounded sum, as each term falls and the order of
    summation is fixed. So its last computed gain is an upper bound. The gains with the highest bounds are recomputed first,
    then those of all columns whose bound reaches the largest of these: no other column can be chosen.
    """

    def gains(index: Tensor) -> Tensor:
        return columns.index_select(0, index).sub_(best).clamp_(min=0).sum(1)

    bound = (columns - best).clamp_(min=0).sum(1).masked_fill_(used, -torch.inf)
    best, free = best.clone(), len(used) - int(used.sum())
    chosen = list[int]()
    for step in range(count):
        if step:  # at first all gains are new
            front = bound.topk(min(_FRONT, free - step), sorted=False).indices
            new = gains(front)
            bound.index_copy_(0, front, new)
            # Candidates: bounds that reach the largest new gain. There are no others where the first of the largest bounds
            # is new.
            if int(bound.argmax()) not in front.tolist():
                rest = (bound >= new.amax()).index_fill_(0, front, False).nonzero().squeeze(1)
                bound.index_copy_(0, rest, gains(rest))
        token = int(bound.argmax())  # the lowest index of the largest gain
        # The new token covers each row at least as well as the ones before.
        torch.maximum(best, columns[token], out=best)
        bound[token] = -torch.inf
        chosen.append(token)
    return torch.tensor(chosen, dtype=torch.int64)

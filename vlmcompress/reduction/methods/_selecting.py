"""What methods share that choose some of the tokens: the share that they keep, a greedy choice, what becomes of the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vlmcompress.reduction.methods._base import ReducerOptions, Reduction, Signals, check_keep, unit

_FRONT = 16  # columns whose gains are computed first in a step


@dataclass(frozen=True)
class SelectingOptions(ReducerOptions):
    """Options of a method that chooses tokens.

    keep:    share of the tokens.
    merge:   `none`: the others are dropped, as the methods' papers have it. `nearest`: each is averaged into the chosen token
        of highest cosine to it, where that is at least `similar`, and dropped elsewhere.
    similar: see `merge`; from -1, where none is dropped, to 1. 0.6 was chosen on the demo models' validation questions.
    """

    keep: float = 0.5
    merge: Literal["none", "nearest"] = dataclasses.field(default="none", kw_only=True)
    similar: float = dataclasses.field(default=0.6, kw_only=True)

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.merge not in ("none", "nearest"):
            raise ValueError(f"merge must be none or nearest, got {str(self.merge)[:40]!r}")
        number = isinstance(self.similar, int | float) and not isinstance(self.similar, bool)
        if not number or not -1 <= self.similar <= 1:
            raise ValueError(f"similar must be a cosine, from -1 to 1, got {self.similar!r}")


def selected(index: Tensor, signals: Signals, options: SelectingOptions) -> Reduction:
    """Keep the tokens `index [m]`, in any order; the others are dropped or merged as the options say."""
    kept = Reduction.keep(index, signals.n)
    if options.merge == "none" or len(kept.anchor) == signals.n:
        return kept
    if signals.features is None:
        raise ValueError("merge=nearest needs signals that are missing: features")
    rows = unit(signals.features)
    likeness, nearest = (rows @ rows[kept.anchor].T).max(1)
    parent = torch.where(likeness >= options.similar, kept.anchor[nearest], -1)
    parent[kept.anchor] = kept.anchor
    return Reduction.join(parent, count=len(index))


def cover(
    worth: Tensor, count: int, weight: Tensor | None = None, slack: float = 0.0, covered: Tensor | None = None
) -> Tensor:
    """Choose `count` columns of `worth [m, n]`, whose rowwise maxima have a large sum; indices in the order of their choice.

    Greedy: always the column that raises that sum most, times `weight [n]` where that is given; the lowest index of those that
    fall short of the most by a share of at most `slack`. Maxima begin at 0, or at those of the columns `covered`, which are
    not chosen again. On a CPU the choice is `lazily` made, on other devices `stepwise`; it is the same.
    """
    columns = worth.T.contiguous()  # a column's gain is then a sum along memory, in the same order for equal columns
    best = columns.new_zeros(columns.shape[1])
    taken = torch.zeros(len(columns), dtype=torch.bool, device=columns.device)
    if covered is not None and len(covered):
        best, taken = columns[covered].amax(0), taken.scatter(0, covered, True)
    choose = lazily if worth.device.type == "cpu" else stepwise
    return choose(columns, best, taken, count, torch.ones_like(columns[:, 0]) if weight is None else weight, slack)


def stepwise(columns: Tensor, best: Tensor, taken: Tensor, count: int, weight: Tensor, slack: float) -> Tensor:
    """Choose for `cover` with all gains computed in each step, so that nothing waits for the device.

    Args:
        columns: `[n, m]`, the table's columns.
        best: `[m]`, what is covered of each row to begin with.
        taken: `[n]`, columns that are not to be chosen.
    """
    lost, chosen = torch.zeros_like(columns[:, 0]).masked_fill(taken, -torch.inf), []
    for _ in range(count):
        gain = (columns - best).clamp(min=0).sum(1)
        token = _first(torch.addcmul(lost, gain, weight), slack)
        best = torch.maximum(best, columns.index_select(0, token)[0])
        lost = lost.scatter(0, token, -torch.inf)
        chosen.append(token)
    return torch.cat(chosen) if chosen else lost.new_empty(0, dtype=torch.int64)


def lazily(columns: Tensor, best: Tensor, taken: Tensor, count: int, weight: Tensor, slack: float) -> Tensor:
    """Choose for `cover` with only those gains computed anew that can be the largest; arguments and result as of `stepwise`.

    What a column gains never rises while others are chosen, nor does its rounded sum, as each term falls and the order stays.
    So its last known gain is a bound (Minoux, 1978). The gains of highest bound are computed first, then those of all columns
    whose bound reaches the largest of these: no other column can be chosen.
    """

    def gains(index: Tensor) -> Tensor:
        return (columns[index] - best).clamp_(min=0).sum(1).mul_(weight[index])

    bound = (columns - best).clamp_(min=0).sum(1).mul_(weight).masked_fill_(taken, -torch.inf)
    free = len(taken) - int(taken.sum())
    chosen = []
    for step in range(count):
        if step:  # at first all are new
            front = bound.topk(min(_FRONT, free - step)).indices
            bound[front] = gains(front)
            old = bound >= bound[front].amax() * (1 - slack)
            old[front] = False
            if len(rest := old.nonzero().squeeze(1)):
                bound[rest] = gains(rest)
        token = _first(bound, slack)
        best = torch.maximum(best, columns[token][0])
        bound[token] = -torch.inf
        chosen.append(token)
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)


def _first(gain: Tensor, slack: float) -> Tensor:
    """The lowest index, `[1]`, of the gains `[n]` that fall short of the largest by a share of at most `slack`."""
    if slack == 0:
        return gain.argmax(0, keepdim=True)
    return (gain >= gain.amax() * (1 - slack)).byte().argmax(0, keepdim=True)

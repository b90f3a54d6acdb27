"""What methods share that choose some of the tokens: the share that they keep, a greedy choice, what becomes of the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vlmcompress.reducers._base import ReducerOptions, Reduction, Signals, check_keep, unit


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
    return Reduction.join(parent)


def cover(
    worth: Tensor, count: int, weight: Tensor | None = None, slack: float = 0.0, covered: Tensor | None = None
) -> Tensor:
    """Choose `count` columns of `worth [m, n]`, whose rowwise maxima have a large sum; indices in the order of their choice.

    Greedy: always the column that raises that sum most, times `weight [n]` where that is given; the lowest index of those that
    fall short of the most by a share of at most `slack`. Maxima begin at 0, or at those of the columns `given`, which are not
    chosen again.
    """
    best = torch.zeros(len(worth), 1, device=worth.device)
    taken = torch.zeros(worth.shape[1], dtype=torch.bool, device=worth.device)
    if covered is not None and len(covered):
        best, taken[covered] = worth[:, covered].amax(1, keepdim=True), True
    chosen = torch.empty(count, dtype=torch.int64, device=worth.device)
    for i in range(count):
        gain = (worth - best).clamp_(min=0).sum(0)
        gain = gain if weight is None else gain * weight
        gain = gain.masked_fill(taken, -1.0)
        chosen[i] = (gain >= gain.amax() * (1 - slack)).int().argmax()
        taken[chosen[i]] = True
        best = torch.maximum(best, worth[:, chosen[i], None])
    return chosen

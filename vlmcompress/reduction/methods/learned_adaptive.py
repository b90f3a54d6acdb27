"""Learned, of as many tokens as the image asks for: few of a plain one, many of a busy one, `keep` of them on average.

Which tokens stay is the choice of `learned`. How many do is decided by a threshold, `level`. It is no threshold on what the
network says: training looks at the order of an image's tokens alone, so worths of two images can't be compared, and on
demo-llava's validation questions a threshold on them was up to 3 points worse than a fixed count, at an eighth of the tokens
on average. What can be compared is how much of an image so many tokens show at best, in the measure of `coverage`, where
`s_ij` is how well token j represents token i. With the tokens in the order in which `coverage` would take them,

    shown_m = sum_i max(s_ij: j among the first m) / sum_i max(s_ij: j among all)

An image keeps as many tokens as the fewest that show `level` of it. The level is learnt from calibration images: it is the one
at which the mean share that they keep is `keep`.

An engine that has to know the number before it encodes an image is told it by a regression on pixels
(`vlmcompress.reduction.methods._counter`), and `reduce` takes that `count` instead of the level.

Costs what `coverage` costs at the same count beside what `learned` costs, and with a `count` nothing more than `learned`.
Learning a level takes all tokens of each image in that order, `n^3` additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vlmcompress.reduction.methods import _selecting as selecting
from vlmcompress.reduction.methods import learned
from vlmcompress.reduction.methods._base import Grid, Reduction, Signals
from vlmcompress.reduction.methods._selecting import selected
from vlmcompress.reduction.methods.coverage import represented

STAGE = "projected"
NEEDS = frozenset({"features"})
COUNT = "adaptive"
SERVED = True

STEP = 64  # tokens that are taken before it is seen whether they are enough


@dataclass(frozen=True)
class Options(learned.Options):
    """`level`: how much of an image has to be shown, from 0 to 1. Where it is not given it is learnt from calibration images,
    which then keep the share `keep` of their tokens on average. The other options are those of `learned`.
    """

    level: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.level, int | float) and not isinstance(self.level, bool)
        if self.level is not None and not (number and 0 <= self.level <= 1):
            raise ValueError(f"level must be a share of an image, from 0 to 1, got {str(self.level)[:40]!r}")

    @property
    def learns(self) -> bool:
        """Levels are learnt."""
        return True

    @property
    def thresholds(self) -> tuple[float, ...] | None:
        """The level, the only one."""
        return None if self.level is None else (self.level,)

    def with_thresholds(self, thresholds: tuple[float, ...] | None) -> Self:
        """The options with this level; with None it has to be learnt."""
        return replace(self, level=thresholds[0] if thresholds else None)


def budget(grid: Grid, options: Options) -> None:
    """Return None, as the number of kept tokens is not known beforehand."""
    return None


def reduce(signals: Signals, options: Options, count: int | None = None) -> Reduction:
    """Keep the tokens that `learned` would, `count` of them; None: as many as the image needs for `level` of it to be shown."""
    assert signals.features is not None
    if options.network is None:
        raise ValueError("learned-adaptive has no scorer; train one with `vlmcompress learn-reducer` first")
    if count is None:
        if options.level is None:
            raise ValueError("learned-adaptive has no level; learn it from calibration images first")
        count = counted(shown(signals, options, options.level), options.level)
    if not 1 <= count <= signals.n:
        raise ValueError(f"{count} of {signals.n} tokens cannot be kept")
    values = learned.worth(options.network.on(signals.features.device), signals.features, signals.grid)
    return selected(torch.cat(learned.choose(values, signals.features, count, options.cover)), signals, options)


def shown(signals: Signals, options: Options, level: float = math.inf) -> Tensor:
    """How much of an image its first 1 to `m` tokens show, `[m]` float64, rising: `n` of them, or enough to show `level`."""
    assert signals.features is not None
    table = represented(signals.features, learned.TEMPERATURE)
    whole = table.amax(1).double().sum()
    order = torch.empty(0, dtype=torch.int64, device=table.device)
    while True:
        order = torch.cat([order, selecting.cover(table, min(STEP, signals.n - len(order)), covered=order)])
        curve = (table[:, order].cummax(1).values.double().sum(0) / whole).cummax(0).values
        if len(order) == signals.n or curve[-1] >= level:
            return curve


def counted(curve: Tensor, level: float) -> int:
    """The fewest tokens that show `level` of an image. `curve`: what `shown` returns."""
    return min(int((curve < level).sum()) + 1, len(curve))


def level(curves: Sequence[Tensor], keep: float) -> float:
    """The highest level at which images keep at most a share `keep` of their tokens on average; one each is the least.

    Args:
        curves: what `shown` returns for each image, all its tokens; at least one.
    """
    if not curves:
        raise ValueError("a level is learnt from at least one image")
    steps, order = torch.cat([curve[:-1] for curve in curves]).sort()  # above a step its image keeps one token more
    token = [torch.full((len(curve),), 1 / len(curve)).double() for curve in curves]  # as a share of its image
    share = sum(image_shares[0] for image_shares in token) + torch.cat([image_shares[1:] for image_shares in token])[
        order
    ].cumsum(0)
    fits = int((share <= (keep + 1e-9) * len(curves)).sum())
    return float(steps[fits]) if fits < len(steps) else 1.0

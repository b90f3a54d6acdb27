"""Learned, of as many tokens as the image asks for: few of a plain one, many of a busy one, `keep` of them on average.

Which tokens stay is the choice of `learned`. How many do is decided by a threshold, `level`. What a network says of two images
can't be compared, as training looks at the order within each. What can be is how much of an image some of its tokens show, in the
measure of `coverage`: with `s_ij` for how well token j represents token i,

    shown_m = sum_i max(s_ij: j among the m of highest worth) / sum_i s_ii

which rises with m, to 1. An image keeps the fewest tokens that show `level` of it. The level is learnt from calibration images:
it's the one at which the mean share that they keep is `keep`.

An engine that has to know the number before it encodes an image is told it by a regression on pixels
(`vlmcompress.reducers._counter`), and `reduce` takes that `count` instead of the level.

Costs `n^2` comparisons more than `learned`; with a `count` nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vlmcompress.reducers import learned
from vlmcompress.reducers._base import Grid, Reduction, Signals, top
from vlmcompress.reducers._selecting import selected
from vlmcompress.reducers.coverage import represented

STAGE = "projected"
NEEDS = frozenset({"features"})
COUNT = "adaptive"
SERVED = True


@dataclass(frozen=True)
class Options(learned.Options):
    """`keep`: share of the tokens kept on average over the calibration images, for learning; `level`: see above, once learnt.

    The others are those of `learned`.
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
    """Keep the tokens that `learned` would, `count` of them; None: as many as show `level` of the image."""
    assert signals.features is not None
    values = _worth(signals, options)
    if count is None:
        if options.level is None:
            raise ValueError("learned-adaptive has no level; learn it from calibration images first")
        count = counted(_shown(values, signals.features), options.level)
    if not 1 <= count <= signals.n:
        raise ValueError(f"{count} of {signals.n} tokens cannot be kept")
    return selected(torch.cat(learned.choose(values, signals.features, count, options.cover)), signals, options)


def shown(signals: Signals, options: Options) -> Tensor:
    """How much of an image its 1 to n tokens of highest worth show, `[n]` float32, rising to 1."""
    assert signals.features is not None
    return _shown(_worth(signals, options), signals.features)


def counted(curve: Tensor, level: float) -> int:
    """The fewest tokens that show `level` of an image. `curve`: what `shown` returns."""
    return min(int((curve < level).sum()) + 1, len(curve))


def level(curves: Sequence[Tensor], keep: float) -> float:
    """The highest level at which images keep at most a share `keep` of their tokens on average, as far as one token each allows.

    Args:
        curves: what `shown` returns for each image, at least one.
    """
    if not curves:
        raise ValueError("a level is learnt from at least one image")
    steps, order = torch.cat([curve[:-1] for curve in curves]).sort()  # above a step its image keeps one token more
    token = [torch.full((len(curve),), 1 / len(curve)).double() for curve in curves]  # as a share of its image
    share = sum(one[0] for one in token) + torch.cat([one[1:] for one in token])[order].cumsum(0)
    fits = int((share <= (keep + 1e-9) * len(curves)).sum())
    return float(steps[fits]) if fits < len(steps) else 1.0


def _worth(signals: Signals, options: Options) -> Tensor:
    if options.network is None:
        raise ValueError("learned-adaptive has no scorer; train one with `vlmcompress learn-reducer` first")
    assert signals.features is not None
    return learned.worth(options.network.on(signals.features.device), signals.features, signals.grid)


def _shown(values: Tensor, features: Tensor) -> Tensor:
    table = represented(features, learned.TEMPERATURE)
    curve = table[:, top(values, len(values))].cummax(1).values.sum(0)
    return curve / curve[-1]

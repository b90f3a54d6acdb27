"""Charts as markup that the style sheet places by percentages, so that they fit any screen with text of one size.

`accuracy` is an interval in a row of a table, `ruler` the numbers of the axis above it, and `scatter` a plot of numbered dots
with intervals. Colours are classes: verdicts, or `even` where nothing is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.document import Cell
from vlmcompress.evaluation.report.words import typeset
from vlmcompress.evaluation.results import Comparison
from vlmcompress.utils.text import points

_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True)
class Axis:
    """An axis from its first tick to its last."""

    ticks: Sequence[float]
    text: Callable[[float], str]

    def at(self, value: float) -> float:
        """The place of a value in percent of the axis; values beyond an end are drawn at it."""
        low, high = self.ticks[0], self.ticks[-1]
        return round(100 * (min(max(value, low), high) - low) / (high - low), 2)

    def labels(self) -> list[tuple[float, str]]:
        """The place and the text of each tick."""
        return [(self.at(tick), typeset(self.text(tick))) for tick in self.ticks]


def linear(low: float, high: float, text: Callable[[float], str]) -> Axis:
    """An axis around both ends, in at most six round steps."""
    step = next((step for step in _STEPS if high - low <= 5 * step), (high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis([number * step for number in range(first, max(last, first + 1) + 1)], text)


def points_axis(comparisons: Sequence[Comparison]) -> Axis:
    """An axis for all intervals, zero and the first margin, but at most 30 points, so that an extreme family does not flatten
    the rest."""
    low = min(-0.01, -comparisons[0].margin, *(c.low for c in comparisons))
    high = max(0.01, *(c.high for c in comparisons))
    return linear(max(low, -0.3), min(high, 0.3), lambda share: points(share).removesuffix(".0"))


def ruler(axis: Axis) -> Cell:
    """The numbers of an axis, for a table's head."""
    marks = (Markup('<span style="left:{}%">{}</span>').format(*label) for label in axis.labels())
    return Cell("", Markup('<div class="row ruler" aria-hidden="true">{}</div>').format(Markup("").join(marks)))


def accuracy(c: Comparison, axis: Axis, *, judged: bool) -> Cell:
    """A difference in accuracy as a dot with its interval; the region beyond the margin of what is judged is shaded."""
    verdict = f": {words.VERDICTS[c.verdict]}" * judged
    label = typeset(f"{points(c.difference)} points, {words.interval(c)}, p = {c.p:.3g}{verdict}")
    low, middle, high = map(axis.at, (c.low, c.difference, c.high))
    shaded = Markup("")
    if judged and -c.margin >= axis.ticks[0]:
        shaded = Markup('<i class="lost" style="width:{}%"></i>').format(axis.at(-c.margin))
    markup = Markup(
        '<div class="row {}" role="img" aria-label="{}" title="{}">{}<i class="zero" style="left:{}%"></i>'
        '<i class="range" style="left:{}%;width:{}%"></i><i class="dot" style="left:{}%"></i></div>'
    )
    tone = c.verdict if judged else "even"
    return Cell("", markup.format(tone, label, label, shaded, axis.at(0.0), low, round(high - low, 2), middle))


def undominated(pairs: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    """The Pareto front of (gain, difference) pairs: those that no other equals or exceeds in both."""
    best, front = -math.inf, set()
    for gain, difference in sorted(pairs, reverse=True):
        if difference > best:
            best = difference
            front.add((gain, difference))
    return front


def scatter(dots: Sequence[Mapping[str, Any]], across: str, margin: float, label: str) -> dict[str, Any]:
    """A plot of candidates for the template: gain from left to right, difference of accuracy upwards, the margin as a line.

    Bars end 10 points beyond the other dots, as few answers have wide intervals.

    Args:
        dots: `number`, `name`, `gain`, `difference`, `low`, `high`, `tone` of each; `strong` for a ring.
        across: what is gained.
        margin: the allowed loss, as a share.
        label: the plot in words.
    """
    gains, differences = ([dot[key] for dot in dots] for key in ("gain", "difference"))
    x = linear(min(1.0, *gains), max(1.1, *gains), lambda gain: f"{gain:g}x")
    low = max(min(dot["low"] for dot in dots), min(-1.5 * margin, min(differences) - 0.1))
    high = min(max(dot["high"] for dot in dots), max(differences) + 0.1)
    y = linear(min(low, -1.5 * margin), max(high, 0.005), lambda share: points(share).removesuffix(".0"))
    front = undominated(list(zip(gains, differences, strict=True)))
    return {
        "label": label,
        "across": across,
        "x": x.labels(),
        "y": y.labels(),
        "zero": y.at(0.0),
        "margin": y.at(-margin),
        "dots": [
            {
                "strong": False,
                **dot,
                "left": x.at(dot["gain"]),
                "bottom": y.at(dot["difference"]),
                "bar": (y.at(dot["low"]), round(y.at(dot["high"]) - y.at(dot["low"]), 2)),
                "front": (dot["gain"], dot["difference"]) in front,
                "title": typeset(f"{dot['name']}: {dot['gain']:.2f}x, {points(dot['difference'])} points"),
            }
            for dot in dots
        ],
    }

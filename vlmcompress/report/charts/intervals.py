"""Dots with whiskers, one table row each: differences of accuracy in points, and ratios of speed."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from vlmcompress.common.text import points
from vlmcompress.report import words
from vlmcompress.report.charts.svg import Axis, at, element, linear, logarithmic
from vlmcompress.report.findings import Row
from vlmcompress.report.words import typeset
from vlmcompress.results import Ratio

_EDGE = 0.06  # share of the width, left free on both sides for half a label


def accuracy_axis(rows: Sequence[Row]) -> Axis:
    """Make an axis that holds every interval, zero and the first row's margin, but no more than 30 points: neither a wild
    family nor the wide margin of families may flatten the rest."""
    low = min(-0.01, -rows[0].found.margin, *(row.found.low for row in rows))
    high = max(0.01, *(row.found.high for row in rows))
    return linear(max(low, -0.3), min(high, 0.3))


def gain_axis(rows: Sequence[Ratio]) -> Axis:
    """Make a logarithmic axis for ratios, with 1x inside."""
    ends = [words.gain(r, x) for r in rows if words.comparable(r) for x in (r.low, r.high)]
    return logarithmic(min([0.9, *ends]), max([1.1, *ends]))


def ruler(axis: Axis, unit: str = "points") -> Markup:
    """Draw an axis's labels, for a table's head."""
    show = (lambda v: f"{v:g}x") if unit == "times" else lambda v: points(v).removesuffix(".0")
    labels = [
        element("text", typeset(show(t)), x=_x(axis, t), y=13, text_anchor="middle", class_="half" if i % 2 else None)
        for i, t in enumerate(axis.ticks)
    ]
    return element("svg", *labels, class_="row ruler", role="img", aria_label=f"axis, {unit}")


def accuracy(row: Row, axis: Axis) -> Markup:
    """Draw a difference and its interval; zero is a line. Where the row is judged, the region beyond the margin is shaded."""
    c = row.found
    judged = f": {words.VERDICTS[c.verdict]}" * row.judged
    label = typeset(f"{points(c.difference)} points, {words.interval(c)}, p = {c.p:.3g}{judged}")
    marks = _whisker(axis, c.low, c.difference, c.high)
    shaded = []
    if row.judged and -c.margin >= axis.low:
        shaded = [element("rect", x=0, y="-50%", width=_x(axis, -c.margin), height="200%", class_="lost")]
    group = element("g", *marks, class_=c.verdict if row.judged else "even")
    return _row(label, *shaded, *_grid(axis, 0.0), group)


def gain(name: str, r: Ratio, axis: Axis) -> Markup:
    """Draw a ratio, turned so that right is better; whiskers are the extremes of the repeats."""
    if not words.comparable(r):
        return _row(f"{words.metric(name)}: not comparable", *_grid(axis, 1.0))
    low, high = sorted(words.gain(r, x) for x in (r.low, r.high))
    middle = words.gain(r, r.ratio)
    tone = "even" if words.unclear(r) else "pass" if middle > 1 else "fail"
    ends = f" ({spread} in the repeats)" if (spread := words.spread(r)) else ""
    label = typeset(f"{words.metric(name)}: {words.pace(r)}{ends}")
    return _row(label, *_grid(axis, 1.0), element("g", *_whisker(axis, low, middle, high), class_=tone))


def _row(label: str, *marks: Markup) -> Markup:
    return element("svg", element("title", label), *marks, class_="row", role="img", aria_label=label)


def _grid(axis: Axis, zero: float) -> list[Markup]:
    ends = {"y1": "-50%", "y2": "150%"}
    lines = [element("line", x1=_x(axis, t), x2=_x(axis, t), **ends, class_="grid") for t in axis.ticks]
    return [*lines, element("line", x1=_x(axis, zero), x2=_x(axis, zero), **ends, class_="zero")]


def _whisker(axis: Axis, low: float, middle: float, high: float) -> list[Markup]:
    line = element("line", x1=_x(axis, low), x2=_x(axis, high), y1="50%", y2="50%", class_="range")
    return [line, element("circle", cx=_x(axis, middle), cy="50%", r=4.5)]


def _x(axis: Axis, value: float) -> str:
    return at(_EDGE + (1 - 2 * _EDGE) * axis.share(value))

"""Small charts of a report: dots with whiskers in rows of tables, cumulative curves and histograms in panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.findings import Row
from vlmcompress.evaluation.report.svg import Axis, Box, apart, element, linear, logarithmic, width
from vlmcompress.evaluation.report.words import typeset
from vlmcompress.evaluation.results import Ratio
from vlmcompress.utils.text import figures, points

_EDGE = 0.06  # share of a row's width, left free on both sides for half a label
WIDTH, HEIGHT, FONT = 320, 214, 13  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 16, 10, 38
_POINTS = 120  # points of a curve

Values = Sequence[float]


def accuracy_axis(rows: Sequence[Row]) -> Axis:
    """An axis that holds every interval, zero and the first row's margin, but at most 30 points: neither a wild family nor
    the wide margin of families may flatten the rest."""
    low = min(-0.01, -rows[0].comparison.margin, *(row.comparison.low for row in rows))
    high = max(0.01, *(row.comparison.high for row in rows))
    return linear(max(low, -0.3), min(high, 0.3))


def gain_axis(rows: Sequence[Ratio]) -> Axis:
    """A logarithmic axis for ratios, with 1x inside."""
    ends = [words.gain(r, x) for r in rows if words.comparable(r) for x in (r.low, r.high)]
    return logarithmic(min([0.9, *ends]), max([1.1, *ends]))


def ruler(axis: Axis, unit: str = "points") -> Markup:
    """An axis's labels, for a table's head."""
    show = (lambda v: f"{v:g}x") if unit == "times" else lambda v: points(v).removesuffix(".0")
    labels = [
        element(
            "text", typeset(show(t)), x=_across(axis, t), y=13, text_anchor="middle", class_="half" if i % 2 else None
        )
        for i, t in enumerate(axis.ticks)
    ]
    return element("svg", *labels, class_="row ruler", role="img", aria_label=f"axis, {unit}")


def accuracy(row: Row, axis: Axis) -> Markup:
    """A difference and its interval; zero is a line. Where the row is judged, the region beyond the margin is shaded."""
    c = row.comparison
    judged = f": {words.VERDICTS[c.verdict]}" * row.judged
    label = typeset(f"{points(c.difference)} points, {words.interval(c)}, p = {c.p:.3g}{judged}")
    marks = _whisker(axis, c.low, c.difference, c.high)
    shaded = []
    if row.judged and -c.margin >= axis.low:
        shaded = [element("rect", x=0, y="-50%", width=_across(axis, -c.margin), height="200%", class_="lost")]
    group = element("g", *marks, class_=c.verdict if row.judged else "even")
    return _row(label, *shaded, *_row_grid(axis, 0.0), group)


def gain(name: str, r: Ratio, axis: Axis) -> Markup:
    """A ratio, turned so that right is better; whiskers are the extremes of the repeats."""
    if not words.comparable(r):
        return _row(f"{words.metric(name)}: not comparable", *_row_grid(axis, 1.0))
    low, high = sorted(words.gain(r, x) for x in (r.low, r.high))
    middle = words.gain(r, r.ratio)
    tone = "even" if words.unclear(r) else "pass" if middle > 1 else "fail"
    ends = f" ({spread} in the repeats)" if (spread := words.spread(r)) else ""
    label = typeset(f"{words.metric(name)}: {words.pace(r)}{ends}")
    return _row(label, *_row_grid(axis, 1.0), element("g", *_whisker(axis, low, middle, high), class_=tone))


def _row(label: str, *marks: Markup) -> Markup:
    return element("svg", element("title", label), *marks, class_="row", role="img", aria_label=label)


def _row_grid(axis: Axis, zero: float) -> list[Markup]:
    ends = {"y1": "-50%", "y2": "150%"}
    lines = [element("line", x1=_across(axis, t), x2=_across(axis, t), **ends, class_="grid") for t in axis.ticks]
    return [*lines, element("line", x1=_across(axis, zero), x2=_across(axis, zero), **ends, class_="zero")]


def _whisker(axis: Axis, low: float, middle: float, high: float) -> list[Markup]:
    line = element("line", x1=_across(axis, low), x2=_across(axis, high), y1="50%", y2="50%", class_="range")
    return [line, element("circle", cx=_across(axis, middle), cy="50%", r=4.5)]


def _across(axis: Axis, value: float) -> str:
    """A value's place across, as a percentage of the row's width."""
    return f"{100 * (_EDGE + (1 - 2 * _EDGE) * axis.share(value)):.2f}%"


def cumulative(title: str, unit: str, runs: Mapping[str, Sequence[Values]]) -> Markup:
    """The share of values below x, on a logarithmic axis, where a constant ratio of two sides is a constant distance.

    Args:
        runs: side ("baseline", "candidate", or "" for neither) -> one list of values a repeat. Each repeat is a thin curve,
            all together a thick one; the median is marked and written. Values of zero count as the smallest positive one.
    """
    pooled = {side: np.concatenate([np.asarray(v, float) for v in lists]) for side, lists in runs.items()}
    positive = np.concatenate(list(pooled.values()))
    positive = positive[positive > 0]
    if positive.size == 0:
        return Markup("")
    axis = logarithmic(float(positive.min()), float(positive.max()))
    medians = {side: float(np.median(values)) for side, values in pooled.items()}
    marks = [_curve(values, axis, f"{side} repeat") for side in runs for values in runs[side] if len(runs[side]) > 1]
    marks += [_curve(values, axis, f"{side} curve") for side, values in pooled.items()]
    marks += _medians(axis, {side: (median, f"{figures(median)} {unit}".strip()) for side, median in medians.items()})
    label = f"{title}: " + ", ".join(f"{side} median {figures(m)} {unit}".strip() for side, m in medians.items())
    return _frame(label, axis, unit, [(0, "0"), (0.5, "50%"), (1, "100%")], marks)


def histogram(title: str, unit: str, sides: Mapping[str, Values]) -> Markup:
    """Counts in at most 24 bins that both sides share: the baseline filled, the candidate as an outline over it."""
    everything = np.concatenate([np.asarray(values, float) for values in sides.values()])
    low, high = float(everything.min()), float(everything.max())
    bins = int(min(24, max(1, high - low + 1)))
    axis = linear(low, high + 1)
    edges = np.linspace(low, high + 1, bins + 1)
    counts = {side: np.histogram(values, edges)[0] for side, values in sides.items()}
    top = linear(0, max(1, *(int(c.max()) for c in counts.values())), 2)
    marks = []
    for side, heights in counts.items():
        steps = [(edges[0], 0.0)]
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
            steps += [(left, height), (right, height)]
        path = " ".join(f"{_x(axis, x):.1f},{_y(top.share(h)):.1f}" for x, h in [*steps, (edges[-1], 0.0)])
        marks.append(element("polyline", points=path, class_=f"{side} bars"))
    label = f"{title}: " + ", ".join(f"{side} {min(v):,.0f} to {max(v):,.0f}" for side, v in sides.items())
    ticks = [(top.share(t), f"{t:,.0f}") for t in top.ticks]
    return _frame(label, axis, unit, ticks, marks)


def _frame(
    label: str,
    axis: Axis,
    unit: str,
    shares: Sequence[tuple[float, str]],
    marks: Sequence[Markup],
) -> Markup:
    lines = []
    for share, text in shares:
        y = _y(share)
        lines.append(element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(element("text", text, x=_LEFT - 6, y=y + 4, text_anchor="end"))
    numbers = [(_x(axis, tick), words.brief(tick)) for tick in axis.ticks]
    step = apart([Box(x - width(text, FONT) / 2, 0, x + width(text, FONT) / 2, 1) for x, text in numbers])
    for i, (x, text) in enumerate(numbers):
        lines.append(element("line", x1=x, x2=x, y1=_y(0), y2=_y(0) + 4, class_="grid"))
        if i % step == 0:
            lines.append(element("text", text, x=x, y=HEIGHT - _BOTTOM + 17, text_anchor="middle"))
    lines.append(element("text", unit, x=WIDTH - _RIGHT, y=HEIGHT - 3, text_anchor="end"))
    look = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "class_": "panel", "style": f"font-size: {FONT}px"}
    return element("svg", element("title", label), *lines, *marks, **look, role="img", aria_label=label)


def _curve(values: Values, axis: Axis, kind: str) -> Markup:
    shares = np.linspace(0, 1, min(_POINTS, max(2, len(values))))
    quantiles = np.quantile(values, shares)
    start = f"{_x(axis, float(quantiles[0])):.1f},{_y(0):.1f} "
    path = start + " ".join(f"{_x(axis, float(q)):.1f},{_y(s):.1f}" for q, s in zip(quantiles, shares, strict=True))
    return element("polyline", points=path, class_=kind)


def _medians(axis: Axis, medians: Mapping[str, tuple[float, str]]) -> list[Markup]:
    """Medians as dots on their curves. The lower has its text left above its dot, the higher right below, as curves rise to
    the right; where there is no room on that side, both are on the other, a line apart."""
    marks, y = [], _y(0.5)
    sides: list[bool] = []  # whether each text stands to the left
    for side, (median, text) in sorted(medians.items(), key=lambda item: item[1][0]):
        x, long = _x(axis, median), width(text, FONT) * 1.1 + 8
        fits_left, fits_right = x - long > _LEFT, x + long < WIDTH
        left = fits_left if not sides or not fits_right else False
        line = sides.count(left) * 1.25 * FONT
        anchor, dx, dy = ("end", -8, -7 - line) if left else ("start", 8, FONT + 4 + line)
        sides.append(left)
        marks.append(element("circle", cx=x, cy=y, r=4, class_=f"{side} dot"))
        marks.append(element("text", text, x=x + dx, y=y + dy, text_anchor=anchor, class_=f"{side} value"))
    return marks


def _x(axis: Axis, value: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * axis.share(value)


def _y(share: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - share)

"""Chart of accuracy against gain in size or speed: several runs as dots with whiskers, the best trade-offs joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vlmcompress.common.text import points as in_points
from vlmcompress.common.text import times
from vlmcompress.report.charts.plot import HALF, Dot, Frame, Plot
from vlmcompress.report.charts.svg import element, linear, logarithmic
from vlmcompress.report.words import VERDICTS, typeset
from vlmcompress.results import Comparison

_MANY = 12  # runs of which some may go without a name; the tables have all


@dataclass(frozen=True)
class Point:
    """A run in the chart: its `gain` (more is better, 1 is the baseline) and its difference in accuracy."""

    name: str
    gain: float
    accuracy: Comparison


def front(points: Sequence[Point]) -> list[Point]:
    """Select the points that no other beats in one respect and equals in the other, by rising gain."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.gain, -p.accuracy.difference)):
        if not best or point.accuracy.difference > best[-1].accuracy.difference:
            best.append(point)
    return best[::-1]


def pareto(points: Sequence[Point], what: str, margin: float, frame: Frame = HALF) -> Markup:
    """Draw runs by gain (`what` names it, "times smaller") and accuracy. 0 is the baseline; shaded is beyond the margin."""
    across = logarithmic(min(1.0, *(p.gain for p in points)), max(1.05, *(p.gain for p in points)))
    lows, highs = [p.accuracy.low for p in points], [p.accuracy.high for p in points]
    up = linear(100 * max(-0.4, min(-1.3 * margin, *lows)), 100 * min(0.4, max(0.005, *highs)))
    plot = Plot(across, up, frame, "x", signed=True)
    area, limit, best = plot.area, plot.y(-100 * margin), front(points)
    lost = {"x": area.left, "width": area.right - area.left, "y": limit, "height": max(0.0, area.bottom - limit)}
    line = [(p.gain, 100 * p.accuracy.difference) for p in best]
    first = sorted(points, key=lambda point: point not in best)
    marks = [
        element("rect", **lost, class_="lost"),
        *plot.grid(what, "points of accuracy"),
        plot.joined(line),
        element("circle", cx=plot.x(1.0), cy=plot.y(0.0), r=4.5, class_="origin"),
        *plot.dots([_dot(point, len(points) <= _MANY or point in best) for point in first], plot.along(line)),
    ]
    label = f"Accuracy against {what}: " + "; ".join(typeset(_said(p)) for p in points)
    return plot.picture(label, *marks)


def _dot(point: Point, named: bool) -> Dot:
    c = point.accuracy
    tooltip = typeset(f"{_said(point)}, {VERDICTS[c.verdict]}")
    low, high = 100 * c.low, 100 * c.high
    return Dot(point.name, point.gain, 100 * c.difference, tooltip, low, high, css=c.verdict, named=named)


def _said(point: Point) -> str:
    return f"{point.name} {times(point.gain)}, {in_points(point.accuracy.difference)} points"

"""Charts of choices: candidates compared, those of a search, and requests that a machine holds at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vlmcompress.evaluation.report.plot import HALF, PAGE, Dot, Frame, Plot
from vlmcompress.evaluation.report.svg import Box, element, linear, logarithmic, picture, width
from vlmcompress.evaluation.report.words import VERDICTS, typeset
from vlmcompress.evaluation.results import Comparison
from vlmcompress.utils.text import figures, times
from vlmcompress.utils.text import points as in_points

_MANY = 12  # compared runs of which some may go without a name; the tables have all
_WINNER, _FRONT, _OTHER = "#d55e00", "#0072b2", "#8a8a8a"
_WILD = 10.0  # points: error bars of few answers end at the chart's edge rather than flatten the rest


@dataclass(frozen=True)
class Point:
    """A compared run: its `gain` (more is better, 1 is the baseline) and its difference in accuracy."""

    name: str
    gain: float
    accuracy: Comparison


def undominated(points: Sequence[Point]) -> list[Point]:
    """The Pareto front: points that no other beats in one respect and equals in the other, by rising gain."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.gain, -p.accuracy.difference)):
        if not best or point.accuracy.difference > best[-1].accuracy.difference:
            best.append(point)
    return best[::-1]


def pareto(points: Sequence[Point], what: str, margin: float, frame: Frame = HALF) -> Markup:
    """Compared runs by gain (`what` names it, "times smaller") and accuracy; the baseline is at (1, 0)."""
    across = logarithmic(min(1.0, *(p.gain for p in points)), max(1.05, *(p.gain for p in points)))
    lows, highs = [p.accuracy.low for p in points], [p.accuracy.high for p in points]
    up = linear(100 * max(-0.4, min(-1.3 * margin, *lows)), 100 * min(0.4, max(0.005, *highs)))
    plot = Plot(across, up, frame, "x")
    area, limit, best = plot.area, plot.y(-100 * margin), undominated(points)
    lost = {"x": area.left, "width": area.right - area.left, "y": limit, "height": max(0.0, area.bottom - limit)}
    line = [(p.gain, 100 * p.accuracy.difference) for p in best]
    first = sorted(points, key=lambda point: point not in best)
    marks = [
        element("rect", **lost, class_="lost"),
        *plot.grid(what, "points of accuracy"),
        plot.joined(line),
        element("circle", cx=plot.x(1.0), cy=plot.y(0.0), r=4.5, class_="origin"),
        *plot.dots([_run(point, len(points) <= _MANY or point in best) for point in first], plot.along(line)),
    ]
    label = f"Accuracy against {what}: " + "; ".join(typeset(_label(p)) for p in points)
    return plot.picture(label, *marks)


def _run(point: Point, named: bool) -> Dot:
    c = point.accuracy
    tooltip = typeset(f"{_label(point)}, {VERDICTS[c.verdict]}")
    low, high = 100 * c.low, 100 * c.high
    return Dot(point.name, point.gain, 100 * c.difference, tooltip, low, high, css=c.verdict, named=named)


def _label(point: Point) -> str:
    return f"{point.name} {times(point.gain)}, {in_points(point.accuracy.difference)} points"


def front(
    candidates: Sequence[Mapping[str, Any]],
    max_drop: float,
    gain: str,
    confirmed: Mapping[str, Any] | None = None,
    frame: Frame = PAGE,
) -> Markup:
    """The candidates of a search that answered questions, as in `search.outcome.plain`, with their Pareto front joined.

    Args:
        max_drop: the floor, as a share.
        gain: what the gain is of, for the axis.
        confirmed: the winner's answers to other questions: `questions`, `difference`, `low`, `high`.
    """
    tried = sorted(
        (row for row in candidates if row["questions"]), key=lambda row: (not row["winner"], not row["front"])
    )
    if not tried:
        return Markup("")
    dots = [_candidate(row) for row in tried]
    if confirmed and tried[0]["winner"]:
        dots.insert(1, _confirmation(confirmed, tried[0]["gain"]))
    across = linear(1.0, max(1.2, *(dot.x for dot in dots)), 6)
    ends = [value for dot in dots for value in (dot.low, dot.high) if dot.named and value is not None]
    heights = [dot.y for dot in dots] + [min(_WILD, max(-_WILD, end)) for end in ends]
    plot = Plot(across, linear(min(-150 * max_drop, *heights), max(0.5, *heights), 6), frame, "x")
    floor, area = plot.y(-100 * max_drop), plot.area
    joined = sorted((row for row in tried if row["front"]), key=lambda row: row["gain"])
    front_line = [(row["gain"], 100 * row["believed"]) for row in joined]
    word = Box(area.left + 4, floor - 1.2 * frame.font, area.left + 4 + width("floor", frame.font), floor)
    marks = [
        *plot.grid(gain, "difference, points"),
        element("line", x1=area.left, x2=area.right, y1=floor, y2=floor, stroke=_WINNER, stroke_dasharray="2 4"),
        element("text", "floor", x=word.left, y=floor - 4, fill=_WINNER, class_="floor"),
        plot.joined(front_line),
        *plot.dots(dots, [word, *plot.along(front_line)]),
    ]
    label = f"Difference in accuracy against gain ({gain}) of {len(tried)} candidates; the front: " + "; ".join(
        f"{row['name']} {times(row['gain'])} {in_points(row['believed'])} points" for row in joined
    )
    return plot.picture(label, *marks)


def _candidate(row: Mapping[str, Any]) -> Dot:
    return Dot(
        row["name"],
        row["gain"],
        100 * row["believed"],
        f"{row['name']}: {times(row['gain'])}, {in_points(row['believed'])} points",
        low=100 * row["low"],
        high=100 * row["high"],
        colour=_WINNER if row["winner"] else _FRONT if row["front"] else _OTHER,
        strong=row["winner"],
        named=row["winner"] or row["front"],
    )


def _confirmation(confirmed: Mapping[str, Any], gain: float) -> Dot:
    low, high = confirmed["low"], confirmed["high"]
    name = f"on {confirmed['questions']:,} other questions"
    tooltip = f"{name}: {in_points(confirmed['difference'])} points ({in_points(low)} to {in_points(high)})"
    look: dict[str, Any] = {"colour": _WINNER, "hollow": True, "named": True}
    return Dot(name, gain, 100 * confirmed["difference"], tooltip, low=100 * low, high=100 * high, **look)


_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 34, 44
_COLOURS = ("#1f6fb4", "#d1602b", "#3c8c4e")


def requests(
    title: str, sizes: Sequence[str], pixels: Sequence[int], lines: Mapping[str, Sequence[float | None]]
) -> Markup:
    """Requests that a machine holds at once over the size of the image, a line for each load, on logarithmic axes.

    Args:
        sizes: names of the image sizes, `448x448`; `pixels`: their pixels, above zero.
        lines: load -> requests at once for each size; None where none fits.
    """
    counts = [value for values in lines.values() for value in values if value]
    if not counts:
        return Markup("")
    across, up = logarithmic(min(pixels), max(pixels)), logarithmic(min(counts), max(counts))

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * across.share(value)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * up.share(value)

    marks = [element("rect", width=_WIDTH, height=_HEIGHT, fill="white"), element("text", title, x=_LEFT, y=18)]
    for tick in up.ticks:
        marks.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(tick), y2=y(tick), stroke="#dddddd"))
        marks.append(element("text", figures(tick), x=_LEFT - 6, y=y(tick) + 4, text_anchor="end"))
    for name, value in zip(sizes, pixels, strict=True):
        marks.append(element("text", name, x=x(value), y=_HEIGHT - _BOTTOM + 18, text_anchor="middle", font_size=10))
    marks.append(element("text", "image", x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 8, text_anchor="middle"))
    for (name, values), colour in zip(lines.items(), _COLOURS, strict=False):
        spots = [(x(at), y(value)) for at, value in zip(pixels, values, strict=True) if value]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in spots)
        marks.append(element("polyline", points=path, fill="none", stroke=colour, stroke_width=2))
        marks += [element("circle", cx=px, cy=py, r=3, fill=colour) for px, py in spots]
        if spots:
            marks.append(element("text", name, x=spots[-1][0] + 8, y=spots[-1][1] + 4, fill=colour))
    label = "; ".join(
        f"{name}: "
        + ", ".join(f"{size} {figures(value) if value else 'none'}" for size, value in zip(sizes, values, strict=True))
        for name, values in lines.items()
    )
    return picture(f"{title}. {label}", _WIDTH, _HEIGHT, *marks)

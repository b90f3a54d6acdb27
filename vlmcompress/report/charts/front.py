"""Chart of a search: gain across, difference in accuracy upwards, the Pareto front joined, and the floor as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vlmcompress.common.text import points, times
from vlmcompress.report.charts.labels import Box, width
from vlmcompress.report.charts.plot import PAGE, Dot, Frame, Plot
from vlmcompress.report.charts.svg import element, linear

_WINNER, _FRONT, _OTHER = "#d55e00", "#0072b2", "#8a8a8a"
_WILD = 10.0  # points: answers to few questions may not flatten the rest, their error bars end at the chart's edge


def front(
    candidates: Sequence[Mapping[str, Any]],
    max_drop: float,
    gain: str,
    confirmed: Mapping[str, Any] | None = None,
    frame: Frame = PAGE,
) -> Markup:
    """Draw the candidates of `search.outcome.plain` that were asked questions.

    Args:
        max_drop: the floor, as a share.
        gain: what the gain is of, for the axis.
        confirmed: what other questions said of the winner: `questions`, `difference`, `low`, `high`.
    """
    tried = sorted(
        (row for row in candidates if row["questions"]), key=lambda row: (not row["winner"], not row["front"])
    )
    if not tried:
        return Markup("")
    dots = [_dot(row) for row in tried]
    if confirmed and tried[0]["winner"]:
        dots.insert(1, _confirmation(confirmed, tried[0]["gain"]))
    across = linear(1.0, max(1.2, *(dot.x for dot in dots)), 6)
    ends = [value for dot in dots for value in (dot.low, dot.high) if dot.named and value is not None]
    heights = [dot.y for dot in dots] + [min(_WILD, max(-_WILD, end)) for end in ends]
    plot = Plot(across, linear(min(-150 * max_drop, *heights), max(0.5, *heights), 6), frame, "x", signed=True)
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
        f"{row['name']} {times(row['gain'])} {points(row['believed'])} points" for row in joined
    )
    return plot.picture(label, *marks)


def _dot(row: Mapping[str, Any]) -> Dot:
    return Dot(
        row["name"],
        row["gain"],
        100 * row["believed"],
        f"{row['name']}: {times(row['gain'])}, {points(row['believed'])} points",
        low=100 * row["low"],
        high=100 * row["high"],
        colour=_WINNER if row["winner"] else _FRONT if row["front"] else _OTHER,
        strong=row["winner"],
        named=row["winner"] or row["front"],
    )


def _confirmation(confirmed: Mapping[str, Any], gain: float) -> Dot:
    low, high = confirmed["low"], confirmed["high"]
    name = f"on {confirmed['questions']:,} other questions"
    tooltip = f"{name}: {points(confirmed['difference'])} points ({points(low)} to {points(high)})"
    look: dict[str, Any] = {"colour": _WINNER, "shape": "diamond", "hollow": True, "named": True}
    return Dot(name, gain, 100 * confirmed["difference"], tooltip, low=100 * low, high=100 * high, **look)

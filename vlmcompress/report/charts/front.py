"""Chart of a search: gain across, difference in accuracy upwards, the Pareto front joined, and the floor as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vlmcompress.common.text import points, times
from vlmcompress.report.charts.plot import LEFT, Plot
from vlmcompress.report.charts.svg import element, linear

_WINNER, _FRONT, _OTHER = "#d55e00", "#0072b2", "#999999"


def front(candidates: Sequence[Mapping[str, Any]], max_drop: float, gain: str) -> Markup:
    """Draw the candidates of `search.outcome.plain` that were asked questions.

    Args:
        max_drop: the floor, as a share.
        gain: what the gain is of, for the axis.
    """
    shown = [one for one in candidates if one["questions"]]
    if not shown:
        return Markup("")
    across = linear(1.0, max(2.0, *(one["gain"] for one in shown)), 6)
    losses = [100 * one["believed"] for one in shown]
    up = linear(min(-100 * max_drop * 1.5, *losses), max(0.5, *losses), 6)
    plot = Plot(across, up, height=480, margin=230)
    joined = sorted((one for one in shown if one["front"]), key=lambda one: one["gain"])
    floor = plot.y(-100 * max_drop)
    marks = [
        *plot.grid(gain, "difference, points of accuracy", "x"),
        element("line", x1=LEFT, x2=plot.right, y1=floor, y2=floor, stroke=_WINNER, stroke_dasharray="2 4"),
        element("text", "floor", x=LEFT + 4, y=floor - 4, fill=_WINNER, font_size="11"),
        plot.joined((one["gain"], 100 * one["believed"]) for one in joined),
        *(_dot(plot, one) for one in shown),
        *plot.names(
            (one["name"], one["gain"], 100 * one["believed"]) for one in shown if one["front"] or one["winner"]
        ),
    ]
    label = f"Difference in accuracy against gain ({gain}) of {len(shown)} candidates; the front: " + "; ".join(
        f"{one['name']} {times(one['gain'])} {points(one['believed'])} points" for one in joined
    )
    return plot.picture(label, *marks)


def _dot(plot: Plot, one: Mapping[str, Any]) -> Markup:
    title = element("title", f"{one['name']}: {times(one['gain'])}, {points(one['believed'])} points")
    colour = _WINNER if one["winner"] else _FRONT if one["front"] else _OTHER
    x, y = plot.x(one["gain"]), plot.y(100 * one["believed"])
    return element("circle", title, cx=x, cy=y, r=7 if one["winner"] else 5, fill=colour)

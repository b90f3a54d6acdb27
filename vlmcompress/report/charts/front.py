"""Chart of a search: gain across, difference in accuracy upwards, the Pareto front joined, and the floor as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vlmcompress.common.text import points, times
from vlmcompress.report import words
from vlmcompress.report.charts.svg import Axis, element, linear, picture

WIDTH, HEIGHT = 960, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 230, 16, 44
_APART = 14  # least distance between lines of names
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
    joined = sorted((one for one in shown if one["front"]), key=lambda one: one["gain"])
    path = " ".join(f"{_x(across, one['gain']):.1f},{_y(up, 100 * one['believed']):.1f}" for one in joined)
    floor = _y(up, -100 * max_drop)
    marks = [
        *_frame(across, up, gain),
        element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=floor, y2=floor, stroke=_WINNER, stroke_dasharray="2 4"),
        element("text", "floor", x=_LEFT + 4, y=floor - 4, fill=_WINNER, font_size="11"),
        element("polyline", points=path, fill="none", stroke="#888", stroke_dasharray="5 4"),
        *(_dot(across, up, one) for one in shown),
        *_names(across, up, [one for one in shown if one["front"] or one["winner"]]),
    ]
    label = f"Difference in accuracy against gain ({gain}) of {len(shown)} candidates; the front: " + "; ".join(
        f"{one['name']} {times(one['gain'])} {points(one['believed'])} points" for one in joined
    )
    return picture(label, WIDTH, HEIGHT, *marks)


def _frame(across: Axis, up: Axis, gain: str) -> list[Markup]:
    marks, bottom, right = [], HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for tick in across.ticks:
        x = _x(across, tick)
        marks.append(element("line", x1=x, x2=x, y1=_TOP, y2=bottom, stroke="#8884"))
        marks.append(element("text", f"{words.brief(tick)}x", x=x, y=bottom + 18, text_anchor="middle", fill="#777"))
    for tick in up.ticks:
        y = _y(up, tick)
        marks.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, stroke="#8884"))
        marks.append(element("text", words.brief(tick), x=_LEFT - 8, y=y + 4, text_anchor="end", fill="#777"))
    marks.append(element("text", gain, x=right, y=HEIGHT - 6, text_anchor="end", fill="#777"))
    return [*marks, element("text", "difference, points of accuracy", x=4, y=HEIGHT - 6, fill="#777")]


def _dot(across: Axis, up: Axis, one: Mapping[str, Any]) -> Markup:
    title = element("title", f"{one['name']}: {times(one['gain'])}, {points(one['believed'])} points")
    colour = _WINNER if one["winner"] else _FRONT if one["front"] else _OTHER
    x, y = _x(across, one["gain"]), _y(up, 100 * one["believed"])
    return element("circle", title, cx=x, cy=y, r=7 if one["winner"] else 5, fill=colour)


def _names(across: Axis, up: Axis, named: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Draw names to the right of the dots, from the top down and never closer than a line."""
    found, last = [], -1e9
    for one in sorted(named, key=lambda row: -row["believed"]):
        last = max(_y(up, 100 * one["believed"]) + 4, last + _APART)
        found.append(element("text", one["name"], x=_x(across, one["gain"]) + 10, y=last, fill="#777", font_size="11"))
    return found


def _x(axis: Axis, gain: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * axis.share(gain)


def _y(axis: Axis, value: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - axis.share(value))

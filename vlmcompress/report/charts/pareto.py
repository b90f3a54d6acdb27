"""Chart of accuracy against gain in size or speed: several runs as dots with whiskers, the best trade-offs joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vlmcompress.common.text import points as in_points
from vlmcompress.common.text import times
from vlmcompress.report import words
from vlmcompress.report.charts.svg import Axis, at, element, linear, logarithmic
from vlmcompress.report.words import typeset
from vlmcompress.results import Comparison

HEIGHT, _TOP, _BOTTOM = 320, 14, 34
_LEFT, _SPAN = 0.09, 0.86  # shares of the width
_FRAME = 380  # pixels across that labels are laid out for; more is more room
_LETTER, _LINE, _GAP = 7, 16, 12  # sizes of a label: width of a letter, height, distance from its dot


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


def pareto(points: Sequence[Point], what: str, margin: float) -> Markup:
    """Draw runs by gain (`what` names it, "times smaller") and accuracy. 0 is the baseline; shaded is beyond the margin."""
    across = logarithmic(min(1.0, *(p.gain for p in points)), max(1.05, *(p.gain for p in points)))
    lows, highs = [p.accuracy.low for p in points], [p.accuracy.high for p in points]
    up = linear(max(-0.4, min(-1.3 * margin, *lows)), min(0.4, max(0.005, *highs)))
    marks = _backdrop(across, up, margin)
    best = front(points)
    for a, b in zip(best[:-1], best[1:], strict=True):
        ends = {"x1": _x(across, a), "x2": _x(across, b), "y1": _y(up, a), "y2": _y(up, b)}
        marks.append(element("line", **ends, class_="front"))
    zero = _height(up, 0.0)
    marks.append(element("circle", cx=at(_LEFT + _SPAN * across.share(1.0)), cy=zero, r=4.5, class_="origin"))
    marks += [_dot(p, across, up, p in best) for p in points]
    marks += _labels(points, across, up)
    marks.append(element("text", f"{what} \N{RIGHTWARDS ARROW}", x=at(_LEFT + _SPAN), y=HEIGHT - 2, text_anchor="end"))
    label = f"Accuracy against {what}: " + "; ".join(
        typeset(f"{p.name} {times(p.gain)}, {in_points(p.accuracy.difference)} points") for p in points
    )
    return element("svg", element("title", label), *marks, class_="pareto", height=HEIGHT, role="img", aria_label=label)


def _backdrop(across: Axis, up: Axis, margin: float) -> list[Markup]:
    bottom = _height(up, up.low)
    limit = _height(up, -margin)
    marks = [element("rect", x=at(_LEFT), width=at(_SPAN), y=limit, height=max(0.0, bottom - limit), class_="lost")]
    for tick in up.ticks:
        y = _height(up, tick)
        kind = "zero" if abs(tick) < 1e-9 else "grid"
        marks.append(element("line", x1=at(_LEFT), x2=at(_LEFT + _SPAN), y1=y, y2=y, class_=kind))
        text = typeset(in_points(tick).removesuffix(".0"))
        marks.append(element("text", text, x=at(_LEFT - 0.012), y=y + 4, text_anchor="end"))
    for tick in across.ticks:
        x = at(_LEFT + _SPAN * across.share(tick))
        marks.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="grid"))
        label = f"{words.brief(tick)}\N{MULTIPLICATION SIGN}"
        marks.append(element("text", label, x=x, y=bottom + 17, text_anchor="middle"))
    return marks


def _dot(point: Point, across: Axis, up: Axis, best: bool) -> Markup:
    x = _x(across, point)
    ends = {"x1": x, "x2": x, "y1": _height(up, point.accuracy.low), "y2": _height(up, point.accuracy.high)}
    dot = element("circle", cx=x, cy=_y(up, point), r=5.5 if best else 4.5)
    return element("g", element("line", **ends, class_="range"), dot, class_=point.accuracy.verdict)


def _labels(points: Sequence[Point], across: Axis, up: Axis) -> list[Markup]:
    """Draw names beside the dots, each where it covers least; a line leads to those that had to move."""
    dots = [(_FRAME * across.share(p.gain), _y(up, p)) for p in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    marks: list[Markup] = []
    for point, (x, y) in sorted(zip(points, dots, strict=True), key=lambda item: item[1][1]):
        length = _LETTER * len(point.name)
        choices = [(sign, step * _LINE) for sign in (1, -1) for step in (0, 1, -1, 2, -2, 3, -3, 4, 5, 6)]
        boxes = {choice: _box(x, y, *choice, length) for choice in choices}
        sign, down = min(choices, key=lambda choice: _cost(boxes[choice], taken) + abs(choice[1]) / 2)
        taken.append(boxes[sign, down])
        anchor = "start" if sign > 0 else "end"
        text = element("text", point.name, x=_GAP * sign, y=down + 4, text_anchor=anchor, class_="name")
        lead = [element("line", x1=0, y1=0, x2=(_GAP - 2) * sign, y2=down, class_="lead")] if down else []
        marks.append(element("svg", *lead, text, x=_x(across, point), y=y, overflow="visible", class_="label"))
    return marks


def _box(x: float, y: float, sign: int, down: float, length: float) -> tuple[float, float, float, float]:
    """The box (left, top, right, bottom) of a label in a frame of ordinary width."""
    near, far = x + _GAP * sign, x + (_GAP + length) * sign
    return min(near, far), y + down - 7, max(near, far), y + down + 7


def _cost(box: tuple[float, float, float, float], taken: Sequence[tuple[float, float, float, float]]) -> float:
    """Cost of a label's box: the area of other labels and dots that it covers, and far more for leaving the frame."""
    left, top, right, bottom = box
    covered = sum(
        max(0.0, min(right, r) - max(left, x)) * max(0.0, min(bottom, b) - max(top, y)) for x, y, r, b in taken
    )
    outside = (
        max(0.0, -20 - left) + max(0.0, right - _FRAME - 20) + max(0.0, bottom - HEIGHT + _BOTTOM) + max(0.0, -top)
    )
    return covered + 100 * outside


def _x(across: Axis, point: Point) -> str:
    return at(_LEFT + _SPAN * across.share(point.gain))


def _y(up: Axis, point: Point) -> float:
    return _height(up, point.accuracy.difference)


def _height(up: Axis, value: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - up.share(value))

"""Chart of predicted error against size: a dot for each setting, those that nothing smaller beats joined and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from vlmcompress.common.text import figures
from vlmcompress.report import words
from vlmcompress.report.charts.svg import Axis, element, linear, logarithmic, picture

if TYPE_CHECKING:
    from vlmcompress.compression.sweep import Point

WIDTH, HEIGHT = 960, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 16, 44
_APART = 14  # least distance between lines of names
COLOURS = {  # of schemes, from Okabe and Ito's palette, which readers of any colour vision tell apart; others are grey
    "rtn": "#999999",
    "gptq": "#0072b2",
    "gptq-plus": "#f0e442",
    "awq": "#d55e00",
    "mbq": "#cc79a7",
    "int8": "#009e73",
    "w8a16": "#56b4e9",
    "fp8": "#e69f00",
}


def tradeoff(points: Sequence[Point], unit: str) -> Markup:
    """Draw bits per weight across and predicted error upwards on a logarithmic axis; settings without error are left out."""
    shown = [point for point in points if point.error > 0]
    if not shown:
        return Markup("")
    across = linear(min(p.bits for p in shown), max(p.bits for p in shown), 8)
    up = logarithmic(min(p.error for p in shown), max(p.error for p in shown))
    best = [point for point in shown if point.best]
    path = " ".join(f"{_x(across, p.bits):.1f},{_y(up, p.error):.1f}" for p in best)
    marks = [
        *_frame(across, up, unit),
        element("polyline", points=path, fill="none", stroke="#888", stroke_dasharray="5 4"),
    ]
    marks += [_dot(across, up, point) for point in shown]
    marks += _names(across, up, best)
    label = f"Predicted error ({unit}) against bits per weight of {len(shown)} settings; best: " + "; ".join(
        f"{p.name} {p.bits:.3g} bits {figures(p.error)}" for p in best
    )
    return picture(label, WIDTH, HEIGHT, *marks)


def _frame(across: Axis, up: Axis, unit: str) -> list[Markup]:
    marks, floor, right = [], HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for tick in across.ticks:
        x = _x(across, tick)
        marks.append(element("line", x1=x, x2=x, y1=_TOP, y2=floor, stroke="#8884"))
        marks.append(element("text", words.brief(tick), x=x, y=floor + 18, text_anchor="middle", fill="#777"))
    for tick in up.ticks:
        y = _y(up, tick)
        marks.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, stroke="#8884"))
        marks.append(element("text", words.brief(tick), x=_LEFT - 8, y=y + 4, text_anchor="end", fill="#777"))
    marks.append(element("text", "bits per weight", x=right, y=HEIGHT - 6, text_anchor="end", fill="#777"))
    return [*marks, element("text", f"predicted, {unit}", x=4, y=HEIGHT - 6, fill="#777")]


def _dot(across: Axis, up: Axis, point: Point) -> Markup:
    """Draw a setting: a square for a shared-out budget, a circle for one width."""
    x, y = _x(across, point.bits), _y(up, point.error)
    title = element("title", f"{point.name}: {point.bits:.4g} bits, {figures(point.error)}")
    look = {"fill": COLOURS.get(str(point.recipe["scheme"]), "#666"), "fill_opacity": 1.0 if point.best else 0.45}
    if "bits" in point.recipe:
        return element("rect", title, x=x - 5, y=y - 5, width=10, height=10, **look)
    return element("circle", title, cx=x, cy=y, r=5, **look)


def _names(across: Axis, up: Axis, best: Sequence[Point]) -> list[Markup]:
    """Draw names to the right of the dots, from the top down and never closer than a line."""
    found, last = [], -1e9
    for point in sorted(best, key=lambda p: -p.error):
        last = max(_y(up, point.error) - 6, last + _APART)
        found.append(element("text", point.name, x=_x(across, point.bits) + 9, y=last, fill="#777", font_size="11"))
    return found


def _x(axis: Axis, bits: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * axis.share(bits)


def _y(axis: Axis, value: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - axis.share(value))

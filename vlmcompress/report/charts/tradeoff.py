"""Chart of predicted error against size: a dot for each setting, those that nothing smaller beats joined and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from vlmcompress.common.text import figures
from vlmcompress.report.charts.plot import PAGE, Dot, Frame, Plot, mark
from vlmcompress.report.charts.svg import element, linear, logarithmic

if TYPE_CHECKING:
    from vlmcompress.runs.sweep import Point

LOOKS = {  # colour and shape of each scheme: readers who do not tell the colours apart have the shapes
    "rtn": ("#8a8a8a", "circle"),
    "gptq": ("#0072b2", "circle"),
    "gptq-plus": ("#e69f00", "up"),
    "awq": ("#d55e00", "down"),
    "mbq": ("#cc79a7", "cross"),
    "int8": ("#009e73", "plus"),
    "w8a16": ("#8150b3", "diamond"),
    "fp8": ("#8c5a2b", "hourglass"),
}
_OTHER = ("#8a8a8a", "diamond")
SHARED = "square"  # of settings that share a budget out


def tradeoff(points: Sequence[Point], unit: str, chosen: Point | None = None, frame: Frame = PAGE) -> Markup:
    """Draw bits per weight across and predicted error upwards on a logarithmic axis, `chosen` with a ring; settings without
    error are left out."""
    shown = [point for point in points if point.error > 0]
    if not shown:
        return Markup("")
    across = linear(min(p.bits for p in shown), max(p.bits for p in shown), 8)
    up = logarithmic(min(p.error for p in shown), max(p.error for p in shown))
    plot = Plot(across, up, frame, reach=6)
    best = [point for point in shown if point.best]
    line = [(point.bits, point.error) for point in best]
    first = sorted(shown, key=lambda point: (point != chosen, not point.best))
    marks = [
        *plot.grid("bits per weight", f"predicted, {unit}"),
        plot.joined(line),
        *plot.dots([_dot(point, point == chosen) for point in first], plot.along(line)),
    ]
    label = f"Predicted error ({unit}) against bits per weight of {len(shown)} settings; best: " + "; ".join(
        f"{p.name} {p.bits:.3g} bits {figures(p.error)}" for p in best
    )
    return plot.picture(label, *marks)


def legend(points: Sequence[Point]) -> list[tuple[str, Markup]]:
    """Name the schemes of settings, each with its mark, and that of settings which share a budget out."""
    schemes = {str(point.recipe["scheme"]) for point in points}
    looks = [(name, *look) for name, look in LOOKS.items() if name in schemes]
    looks += [(name, *_OTHER) for name in sorted(schemes - set(LOOKS))]
    looks += [("budget of bits", LOOKS["gptq"][0], SHARED)] if any("bits" in p.recipe for p in points) else []
    return [
        (name, element("svg", mark(shape, 0, 0, 5, colour), viewBox="-7 -7 14 14", width=14, aria_hidden="true"))
        for name, colour, shape in looks
    ]


def _dot(point: Point, chosen: bool) -> Dot:
    """Describe a setting's mark: filled where nothing of at most its size is better."""
    colour, shape = LOOKS.get(str(point.recipe["scheme"]), _OTHER)
    return Dot(
        point.name if point.best or chosen else "",
        point.bits,
        point.error,
        f"{point.name}: {point.bits:.4g} bits, {figures(point.error)}",
        colour=colour,
        shape=SHARED if "bits" in point.recipe else shape,
        strong=chosen,
        hollow=not (point.best or chosen),
    )

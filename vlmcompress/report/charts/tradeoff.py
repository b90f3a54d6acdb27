"""Chart of predicted error against size: a dot for each setting, those that nothing smaller beats joined and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from vlmcompress.common.text import figures
from vlmcompress.report.charts.plot import Plot
from vlmcompress.report.charts.svg import element, linear, logarithmic

if TYPE_CHECKING:
    from vlmcompress.compression.sweep import Point

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
    plot = Plot(across, up, height=520, margin=150)
    best = [point for point in shown if point.best]
    marks = [
        *plot.grid("bits per weight", f"predicted, {unit}"),
        plot.joined((point.bits, point.error) for point in best),
        *(_dot(plot, point) for point in shown),
        *plot.names((point.name, point.bits, point.error) for point in best),
    ]
    label = f"Predicted error ({unit}) against bits per weight of {len(shown)} settings; best: " + "; ".join(
        f"{p.name} {p.bits:.3g} bits {figures(p.error)}" for p in best
    )
    return plot.picture(label, *marks)


def _dot(plot: Plot, point: Point) -> Markup:
    """Draw a setting: a square for a shared-out budget, a circle for one width."""
    x, y = plot.x(point.bits), plot.y(point.error)
    title = element("title", f"{point.name}: {point.bits:.4g} bits, {figures(point.error)}")
    look = {"fill": COLOURS.get(str(point.recipe["scheme"]), "#666"), "fill_opacity": 1.0 if point.best else 0.45}
    if "bits" in point.recipe:
        return element("rect", title, x=x - 5, y=y - 5, width=10, height=10, **look)
    return element("circle", title, cx=x, cy=y, r=5, **look)

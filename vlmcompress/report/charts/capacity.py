"""Chart of how many requests a machine holds at once, over the size of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from vlmcompress.common.text import figures
from vlmcompress.report.charts.svg import element, logarithmic, picture

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 34, 44
_COLOURS = ("#1f6fb4", "#d1602b", "#3c8c4e")


def requests(
    title: str, sizes: Sequence[str], pixels: Sequence[int], lines: Mapping[str, Sequence[float | None]]
) -> Markup:
    """Draw a line for each load, on logarithmic axes.

    Args:
        sizes: names of the image sizes, `448x448`; `pixels`: their pixels, above zero.
        lines: load -> requests at once for each size; None where none fits.
    """
    known = [value for values in lines.values() for value in values if value]
    if not known:
        return Markup("")
    across, up = logarithmic(min(pixels), max(pixels)), logarithmic(min(known), max(known))

    def x(value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * across.share(value)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * up.share(value)

    marks = [element("rect", width=WIDTH, height=HEIGHT, fill="white"), element("text", title, x=_LEFT, y=18)]
    for tick in up.ticks:
        marks.append(element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y(tick), y2=y(tick), stroke="#dddddd"))
        marks.append(element("text", figures(tick), x=_LEFT - 6, y=y(tick) + 4, text_anchor="end"))
    for name, value in zip(sizes, pixels, strict=True):
        marks.append(element("text", name, x=x(value), y=HEIGHT - _BOTTOM + 18, text_anchor="middle", font_size=10))
    marks.append(element("text", "image", x=(_LEFT + WIDTH - _RIGHT) / 2, y=HEIGHT - 8, text_anchor="middle"))
    for (name, values), colour in zip(lines.items(), _COLOURS, strict=False):
        points = [(x(at), y(value)) for at, value in zip(pixels, values, strict=True) if value]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        marks.append(element("polyline", points=path, fill="none", stroke=colour, stroke_width=2))
        marks += [element("circle", cx=px, cy=py, r=3, fill=colour) for px, py in points]
        if points:
            marks.append(element("text", name, x=points[-1][0] + 8, y=points[-1][1] + 4, fill=colour))
    said = "; ".join(
        f"{name}: "
        + ", ".join(f"{size} {figures(value) if value else 'none'}" for size, value in zip(sizes, values, strict=True))
        for name, values in lines.items()
    )
    return picture(f"{title}. {said}", WIDTH, HEIGHT, *marks)

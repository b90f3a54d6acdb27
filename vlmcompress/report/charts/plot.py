"""A plot of dots with names over two axes with a grid, which the charts of a sweep and of a search share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from vlmcompress.report import words
from vlmcompress.report.charts.svg import Axis, element, picture

WIDTH = 960
LEFT, _TOP, _BOTTOM = 64, 16, 44
_APART = 14  # least distance between lines of names


@dataclass(frozen=True)
class Plot:
    """The frame: two axes, the height of the drawing, and the room `margin` to the right, for names (pixels)."""

    across: Axis
    up: Axis
    height: int
    margin: int

    @property
    def right(self) -> int:
        """Where the axis across ends."""
        return WIDTH - self.margin

    def x(self, value: float) -> float:
        """The place of a value across."""
        return LEFT + (self.right - LEFT) * self.across.share(value)

    def y(self, value: float) -> float:
        """The place of a value upwards."""
        return _TOP + (self.height - _TOP - _BOTTOM) * (1 - self.up.share(value))

    def grid(self, across: str, up: str, unit: str = "") -> list[Markup]:
        """Draw the grid with its numbers, those across with their `unit`, and the names of both axes."""
        marks, floor = [], self.height - _BOTTOM
        for tick in self.across.ticks:
            x, text = self.x(tick), f"{words.brief(tick)}{unit}"
            marks.append(element("line", x1=x, x2=x, y1=_TOP, y2=floor, stroke="#8884"))
            marks.append(element("text", text, x=x, y=floor + 18, text_anchor="middle", fill="#777"))
        for tick in self.up.ticks:
            y = self.y(tick)
            marks.append(element("line", x1=LEFT, x2=self.right, y1=y, y2=y, stroke="#8884"))
            marks.append(element("text", words.brief(tick), x=LEFT - 8, y=y + 4, text_anchor="end", fill="#777"))
        below = self.height - 6
        marks.append(element("text", across, x=self.right, y=below, text_anchor="end", fill="#777"))
        return [*marks, element("text", up, x=4, y=below, fill="#777")]

    def joined(self, points: Iterable[tuple[float, float]]) -> Markup:
        """Draw a dashed line from point to point."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return element("polyline", points=path, fill="none", stroke="#888", stroke_dasharray="5 4")

    def names(self, named: Iterable[tuple[str, float, float]]) -> list[Markup]:
        """Draw names to the right of their points, from the top down and never closer than a line."""
        found, last = [], -1e9
        for name, x, y in sorted(named, key=lambda one: -one[2]):
            last = max(self.y(y) + 4, last + _APART)
            found.append(element("text", name, x=self.x(x) + 10, y=last, fill="#777", font_size="11"))
        return found

    def picture(self, label: str, *marks: Markup) -> Markup:
        """Build the drawing of marks. `label` says in words what it shows."""
        return picture(label, WIDTH, self.height, *marks)

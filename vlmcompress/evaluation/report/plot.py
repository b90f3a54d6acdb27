"""Plots of named dots over two axes with a grid, for searches and comparisons of candidates.

A plot is drawn twice, for a `Frame` as broad as a page and for one as broad as a phone; the page's style sheet shows the one
that fits (`both`), so that text is never scaled below what can be read. Names are placed greedily, the same way every time:
they overlap neither each other nor dots and lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from markupsafe import Markup

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.svg import Axis, Box, apart, element, picture, width
from vlmcompress.evaluation.report.words import typeset

_DOT = 6  # half the side of the box that names keep off
_GAP = 9  # from a dot's centre to its name
_CLOSE = 12  # from a dot to its name without a line between them
_STEP = 6  # between boxes along a line
_REACH = 3.5  # font sizes that a name which is not needed may be away from its dot
_CELLS = 9  # places across that are tried for a name that finds none beside its dot
_GREY = {"fill": "#777"}  # what a drawing that is a file of its own shows; a page's style sheet goes before it


@dataclass(frozen=True)
class Frame:
    """Size of a drawing and of its text, in units that are about pixels where it is shown; `name` is its CSS class, `aside`
    the room between bars that would hide each other."""

    name: str
    width: int
    height: int
    font: int
    aside: int


PAGE = Frame("broad", 920, 480, 13, 6)
HALF = Frame("half", 430, 340, 13, 4)
PHONE = Frame("narrow", 300, 400, 12, 4)


@dataclass(frozen=True)
class Dot:
    """A mark at (x, y), in the axes' units, with its tooltip.

    Attributes:
        name: its name; names of dots that come first are placed first.
        low, high: ends of its error bar upwards; None: it has none.
        css: CSS classes of its kind.
        colour: of the mark and its bar where no style sheet is.
        strong: whether it is the one that the plot is about: larger, with a ring, its name needed and bold.
        named: whether its name is needed, as a strong one's is; others are left out where there is no room.
        hollow: whether it is an outline, of a diamond, instead of a disc.
        aside: how far it stands aside of its place, so as not to hide another, in pixels.
    """

    name: str
    x: float
    y: float
    tooltip: str
    low: float | None = None
    high: float | None = None
    css: str = ""
    colour: str = "#777"
    strong: bool = False
    named: bool = False
    hollow: bool = False
    aside: float = 0.0


@dataclass(frozen=True)
class Plot:
    """Two axes in a frame. `unit` stands behind the numbers across, a sign before those upwards."""

    across: Axis
    up: Axis
    frame: Frame
    unit: str = ""

    @property
    def area(self) -> Box:
        """What the axes span, between their numbers."""
        font, texts = self.frame.font, [self._tick(tick) for tick in self.up.ticks]
        left = max(width(text, font) for text in texts) + 10
        return Box(left, 1.9 * font, self.frame.width - 14.0, self.frame.height - 3.4 * font)

    def x(self, value: float) -> float:
        """A value's pixel across."""
        area = self.area
        return area.left + (area.right - area.left) * self.across.share(value)

    def y(self, value: float) -> float:
        """A value's pixel from the top."""
        area = self.area
        return area.bottom - (area.bottom - area.top) * self.up.share(value)

    def _tick(self, tick: float) -> str:
        """The text of a tick upwards."""
        return typeset("+" * (tick > 0) + words.brief(tick))

    def grid(self, across: str, up: str) -> list[Markup]:
        """Draw the grid with its numbers, as many as have room, and the names of both axes."""
        area, font, marks = self.area, self.frame.font, []
        texts = [typeset(f"{words.brief(tick)}{self.unit}") for tick in self.across.ticks]
        centres, halves = map(self.x, self.across.ticks), [width(text, font) / 2 for text in texts]
        step = apart(
            [Box(x - half, area.bottom, x + half, area.bottom) for x, half in zip(centres, halves, strict=True)]
        )
        for i, (tick, text) in enumerate(zip(self.across.ticks, texts, strict=True)):
            x = self.x(tick)
            marks.append(element("line", x1=x, x2=x, y1=area.top, y2=area.bottom, stroke="#8884", class_="grid"))
            if i % step == 0:
                where = {"x": x, "y": area.bottom + 1.4 * font, "text_anchor": "middle"}
                marks.append(element("text", text, **where, **_GREY))
        for tick in self.up.ticks:
            y = self.y(tick)
            kind = "zero" if tick == 0 else "grid"
            marks.append(element("line", x1=area.left, x2=area.right, y1=y, y2=y, stroke="#8884", class_=kind))
            marks.append(element("text", self._tick(tick), x=area.left - 7, y=y + 4, text_anchor="end", **_GREY))
        below = self.frame.height - 0.4 * font
        marks.append(
            element("text", f"{across} \N{RIGHTWARDS ARROW}", x=area.right, y=below, text_anchor="end", **_GREY)
        )
        return [*marks, element("text", f"\N{UPWARDS ARROW} {up}", x=2, y=1.1 * font, **_GREY)]

    def joined(self, points: Iterable[tuple[float, float]]) -> Markup:
        """Draw a dashed line from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in self._corners(points))
        return element("polyline", points=path, fill="none", stroke="#888", stroke_dasharray="5 4", class_="front")

    def _corners(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in points]

    def along(self, points: Iterable[tuple[float, float]]) -> list[Box]:
        """Small boxes along the line from point to point, which names keep off."""
        return [box for start, end in pairwise(self._corners(points)) for box in along(start, end)]

    def dots(self, dots: Sequence[Dot], keep_off: Sequence[Box] = ()) -> list[Markup]:
        """Draw bars, then dots, the first above the others, then the names that have room.

        Args:
            keep_off: what names should not cover beside the dots.
        """
        dots = self._abreast(dots)
        behind = dots[::-1]
        bars = [self._bar(dot) for dot in behind if dot.low is not None and dot.high is not None]
        return [*bars, *(self._dot(dot) for dot in behind), *self._names(dots, keep_off)]

    def _abreast(self, dots: Sequence[Dot]) -> list[Dot]:
        """Move dots with bars that would hide each other a few pixels aside, alternately right and left."""
        moved: list[Dot] = []
        area = self.area
        for dot in dots:
            taken = [self.x(other.x) + other.aside for other in moved if other.low is not None]
            at = self.x(dot.x)
            steps = (at + sign * step * self.frame.aside for step in range(5) for sign in (1, -1))
            free = (
                x
                for x in steps
                if all(abs(x - other) > self.frame.aside - 0.1 for other in taken)
                and area.left + 5 <= x <= area.right + 8
            )
            aside = next(free, at) - at if dot.low is not None else 0.0
            moved.append(replace(dot, aside=aside))
        return moved

    def _bar(self, dot: Dot) -> Markup:
        assert dot.low is not None and dot.high is not None
        x, ends = self.x(dot.x) + dot.aside, {"y1": self.y(dot.high), "y2": self.y(dot.low)}
        look = {
            "stroke": dot.colour,
            "stroke_width": 2.5 if dot.strong else 1.5,
            "opacity": None if dot.named else 0.45,
        }
        return element("line", x1=x, x2=x, **ends, **look, class_=f"bar {dot.css}".strip())

    def _dot(self, dot: Dot) -> Markup:
        x, y = self.x(dot.x) + dot.aside, self.y(dot.y)
        marks = [mark(x, y, 5.5 if dot.strong else 4.5, dot.colour, dot.hollow)]
        if dot.strong:
            ring = {"r": 9.5, "fill": "none", "stroke": dot.colour, "stroke_width": 2}
            marks.append(element("circle", cx=x, cy=y, **ring, class_="ring"))
        return element("g", element("title", dot.tooltip), *marks, class_=f"dot-of {dot.css}".strip())

    def _names(self, dots: Sequence[Dot], keep_off: Sequence[Box]) -> list[Markup]:
        font, marks = self.frame.font, []
        spots = [(self.x(dot.x) + dot.aside, self.y(dot.y)) for dot in dots]
        boxes = [Box(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in spots]
        names = [
            Name(dot.name, x, y, dot.strong or dot.named, dot.strong)
            for dot, (x, y) in zip(dots, spots, strict=True)
            if dot.name
        ]
        names.sort(key=lambda name: not name.needed)
        area = self.area
        room = Box(area.left + 2, area.top, self.frame.width, area.bottom)
        for name, box in place(names, [*boxes, *keep_off], room, font):
            if way := lead(name, box):
                end = way[-1]
                ends = {"x1": name.x, "y1": name.y, "x2": end.left + 1, "y2": end.top + 1}
                marks.append(element("line", **ends, stroke="#888", class_="lead"))
            anchor, x = ("end", box.right) if box.right <= name.x else ("start", box.left)
            look = {"font_weight": 650 if name.bold else None, "class_": "name"}
            marks.append(
                element("text", name.text, x=x, y=box.bottom - 0.35 * font, text_anchor=anchor, **look, **_GREY)
            )
        return marks

    def picture(self, label: str, *marks: Markup) -> Markup:
        """The SVG of these marks. `label` says in words what it shows."""
        frame = self.frame
        return picture(label, frame.width, frame.height, *marks, font=frame.font, class_=f"plot {frame.name}")


def both(draw: Callable[[Frame], Markup], frame: Frame = PAGE) -> Markup:
    """Draw for a page and for a phone, of which the style sheet shows one; empty where there is nothing to draw."""
    return draw(frame) + draw(PHONE)


_DIAMOND = "M0-1.3L1.2 0L0 1.3L-1.2 0Z"  # around (0, 0), of radius 1


def mark(x: float, y: float, radius: float, colour: str, hollow: bool = False) -> Markup:
    """Draw a disc, or the outline of a diamond."""
    if not hollow:
        return element("circle", cx=x, cy=y, r=radius, fill=colour, stroke=colour, class_="mark")
    place = f"translate({x:.1f} {y:.1f}) scale({radius:g})"
    look = {"fill": "none", "stroke": colour, "class_": "mark hollow"}
    return element("path", d=_DIAMOND, transform=place, stroke_width=0.3, **look)


@dataclass(frozen=True)
class Name:
    """The name of a dot at (x, y). `needed`: it is drawn even where it has to cover marks or be far off."""

    text: str
    x: float
    y: float
    needed: bool = False
    bold: bool = False


def place(names: Sequence[Name], marks: Sequence[Box], frame: Box, size: float) -> list[tuple[Name, Box]]:
    """A box for each name that overlaps no other name and stays in the frame, near its dot and off the marks.

    Args:
        names: the most important first; they choose in this order.
        marks: dots, lines and other text, which names keep off.
        size: of the font, in pixels.

    Returns:
        The names that found room; of those that are not needed, none that would cover a mark, or whose lead to its dot would
        cross another's name.
    """
    placed: list[tuple[Name, Box]] = []
    taken: list[Box] = []  # by leads
    for name in names:
        best: tuple[float, Box] | None = None
        for box, away in sorted(_choices(name, frame, size), key=lambda choice: choice[1]):
            if best and away >= best[0]:
                break  # the rest is farther still
            if any(box.shared(other) for _, other in placed):
                continue
            covered = sum(box.shared(mark) for mark in (*marks, *taken))
            crossed = sum(spot.shared(other) for spot in lead(name, box) for _, other in placed)
            if not name.needed and (covered or crossed or away > _REACH * size):
                continue
            cost = covered + size * crossed + away
            if best is None or cost < best[0]:
                best = cost, box
        if best:
            placed.append((name, best[1]))
            taken += lead(name, best[1])
    return placed


def lead(name: Name, box: Box) -> list[Box]:
    """Small boxes along the line from a dot to its name's box, the nearest to the name last; none where the two are close."""
    x, y = min(max(name.x, box.left), box.right), min(max(name.y, box.top), box.bottom)
    if abs(x - name.x) <= _CLOSE and abs(y - name.y) <= _CLOSE:
        return []
    return along((name.x, name.y), (x, y))


def along(start: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    """Small boxes along a straight line, ends included."""
    (x1, y1), (x2, y2) = start, end
    count = 1 + int(math.hypot(x2 - x1, y2 - y1) / _STEP)
    spots = ((x1 + (x2 - x1) * i / count, y1 + (y2 - y1) * i / count) for i in range(count + 1))
    return [Box(x - 1, y - 1, x + 1, y + 1) for x, y in spots]


def _choices(name: Name, frame: Box, size: float) -> Iterator[tuple[Box, float]]:
    """Boxes inside the frame, each with its distance from the best: right of the dot, left, above and below, then anywhere."""
    long, high = width(name.text, size) * (1.1 if name.bold else 1.0), 1.25 * size
    places = []
    for line in range(-8, 9):
        top = name.y + line * high - high / 2
        away = abs(line) * high
        places += [(name.x + _GAP, top, away), (name.x - _GAP - long, top, away + 1)]
        if line:
            start = min(max(name.x - long / 2, frame.left), frame.right - long)
            places.append((start, top + math.copysign(_GAP - high / 2, line), away + 2))
    if name.needed:
        rows = int((frame.bottom - frame.top) / high)
        step = max(0.0, frame.right - frame.left - long) / (_CELLS - 1)
        for row in range(rows):
            top = frame.top + row * high
            for cell in range(_CELLS):
                left = frame.left + cell * step
                places.append((left, top, 1.5 * math.hypot(left + long / 2 - name.x, top + high / 2 - name.y)))
    for left, top, away in places:
        box = Box(left, top, left + long, top + high)
        if box.within(frame):
            yield box, away

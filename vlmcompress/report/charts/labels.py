"""Where names of dots go: boxes of text that touch neither each other nor the dots, found greedily and the same every time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

GAP = 9  # from a dot's centre to its name
_NARROW, _BROAD = "ijlftrI.,:;|!'()[] ", "mwMW%@\N{RIGHTWARDS ARROW}"
_CLOSE = 12  # from a dot to its name without a line that leads there
_STEP = 6  # between boxes along a line
_CELLS = 9  # places across that are tried for a name that finds none beside its dot


class Box(NamedTuple):
    """A rectangle, in pixels from the top left."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: Box) -> float:
        """The area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        return max(0.0, across) * max(0.0, min(self.bottom, other.bottom) - max(self.top, other.top))

    def within(self, other: Box) -> bool:
        """Whether no part is outside the other."""
        return (
            self.left >= other.left
            and self.top >= other.top
            and self.right <= other.right
            and self.bottom <= other.bottom
        )


@dataclass(frozen=True)
class Name:
    """The name of a dot at (x, y). `needed`: it is drawn even where it has to cover marks or be far off."""

    text: str
    x: float
    y: float
    needed: bool = False
    bold: bool = False


def width(text: str, size: float) -> float:
    """An upper estimate of a text's width in a sans-serif font of `size` pixels, measured on DejaVu Sans, a broad one."""
    return size * sum(0.4 if c in _NARROW else 1.0 if c in _BROAD else 0.78 if c.isupper() else 0.65 for c in text)


def place(
    names: Sequence[Name], marks: Sequence[Box], frame: Box, size: float, reach: float = 3.5
) -> list[tuple[Name, Box]]:
    """Find a box for each name that overlaps no other name and stays in the frame, near its dot and off the marks.

    Args:
        names: the most important first; they choose in this order.
        marks: dots, lines and other text, which names keep off.
        size: of the font, in pixels.
        reach: font sizes that a name that is not needed may be away from its dot.

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
            if not name.needed and (covered or crossed or away > reach * size):
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


def apart(boxes: Sequence[Box], gap: float = 6) -> int:
    """The least step at which every so manyth of some boxes in a row are `gap` pixels apart."""
    for step in range(1, len(boxes)):
        shown = boxes[::step]
        if all(b.left - a.right >= gap or a.top - b.bottom >= 0 for a, b in zip(shown, shown[1:], strict=False)):
            return step
    return max(1, len(boxes))


def _choices(name: Name, frame: Box, size: float) -> Iterator[tuple[Box, float]]:
    """Boxes inside the frame, each with its distance from the best: right of the dot, left, above and below, then anywhere."""
    long, high = width(name.text, size) * (1.1 if name.bold else 1.0), 1.25 * size
    places = []
    for line in range(-8, 9):
        top = name.y + line * high - high / 2
        away = abs(line) * high
        places += [(name.x + GAP, top, away), (name.x - GAP - long, top, away + 1)]
        if line:
            start = min(max(name.x - long / 2, frame.left), frame.right - long)
            places.append((start, top + math.copysign(GAP - high / 2, line), away + 2))
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

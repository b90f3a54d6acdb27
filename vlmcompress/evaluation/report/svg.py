"""What all charts are built of: SVG elements whose text is escaped, axes with round ticks, boxes of text.

Charts are inline SVG, pure functions from numbers to markup, coloured by the page's style sheet. Those in tables use
percentages across, so they fill any width with text of one size; others have a fixed frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

_NARROW, _BROAD = "ijlftrI.,:;|!'()[] ", "mwMW%@\N{RIGHTWARDS ARROW}"


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Markup `<name a="b">children</name>`; `_` in a name becomes `-`, a trailing one is dropped, and None is left out."""
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    text = Markup("").join(Markup(' {}="{}"').format(key, _plain(value)) for key, value in named.items())
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), text, Markup("").join(escape(child) for child in children))


def picture(label: str, width: int, height: int, *marks: Markup, font: int = 12, **attributes: object) -> Markup:
    """An SVG that can be a file of its own, with text of `font` units. `label` says in words what it shows."""
    return element(
        "svg",
        element("title", label),
        *marks,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
        font_family="system-ui, sans-serif",
        style=f"font-size: {font}px",
        **attributes,
    )


def _plain(value: object) -> object:
    """An attribute's value; coordinates have at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, with ticks at round numbers. `share(value)` is in 0 to 1."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def share(self, value: float) -> float:
        """The position of a value in 0 to 1, held inside the axis."""
        if self.log:
            low, high, value = (math.log(x) for x in (self.low, self.high, max(value, self.low)))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear(low: float, high: float, count: int = 4) -> Axis:
    """An axis of about `count` steps of 1, 2, 2.5 or 5 times a power of ten, ends included."""
    if high - low < 1e-12:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [i * step for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def logarithmic(low: float, high: float) -> Axis:
    """A logarithmic axis, with ticks at powers of ten, at 1, 2 and 5 if it is short, or evenly spaced if very short."""
    low, high = low / 1.03, max(high, low * 1.2) * 1.03
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5)):
        ticks = [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]
        if len(ticks) >= 3:
            return Axis(low, high, ticks[:: math.ceil(len(ticks) / 6)], log=True)
    ticks = [tick for tick in linear(low, high, 5).ticks if low <= tick <= high]
    return Axis(low, high, ticks, log=True)


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
        """Whether this box lies inside the other."""
        return (
            self.left >= other.left
            and self.top >= other.top
            and self.right <= other.right
            and self.bottom <= other.bottom
        )


def width(text: str, size: float) -> float:
    """An upper estimate of a text's width in a sans-serif font of `size` pixels, measured on DejaVu Sans, a broad one."""
    return size * sum(0.4 if c in _NARROW else 1.0 if c in _BROAD else 0.78 if c.isupper() else 0.65 for c in text)


def apart(boxes: Sequence[Box], gap: float = 6) -> int:
    """The smallest step at which `boxes[::step]`, which stand in a row, are `gap` pixels apart."""
    for step in range(1, len(boxes)):
        if all(b.left - a.right >= gap or a.top - b.bottom >= 0 for a, b in pairwise(boxes[::step])):
            return step
    return max(1, len(boxes))

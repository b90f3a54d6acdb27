"""Parts of all charts: an element builder that escapes, and axes with round ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup, escape

Scale = Callable[[float], float]


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Build `<name a="b">children</name>`; `_` in a name becomes `-`, a trailing one is dropped, and None is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    text = Markup("").join(Markup(' {}="{}"').format(key, _plain(value)) for key, value in given.items())
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), text, Markup("").join(escape(child) for child in children))


def picture(label: str, width: int, height: int, *marks: Markup, font: int = 12, **attributes: object) -> Markup:
    """Build a drawing that can be a file of its own, with text of `font` units. `label` says in words what it shows."""
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
    """Write an attribute's value, coordinates to a tenth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def at(share: float) -> str:
    """Write a position across as a percentage of the chart's width."""
    return f"{100 * share:.2f}%"


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
    """Make an axis of about `count` steps of 1, 2, 2.5 or 5 times a power of ten, ends included."""
    if high - low < 1e-12:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [i * step for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def logarithmic(low: float, high: float) -> Axis:
    """Make a logarithmic axis, with ticks at powers of ten, at 1, 2 and 5 if it is short, or evenly spaced if very short."""
    low, high = low / 1.03, max(high, low * 1.2) * 1.03
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5)):
        ticks = [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]
        if len(ticks) >= 3:
            return Axis(low, high, ticks[:: math.ceil(len(ticks) / 6)], log=True)
    ticks = [tick for tick in linear(low, high, 5).ticks if low <= tick <= high]
    return Axis(low, high, ticks, log=True)

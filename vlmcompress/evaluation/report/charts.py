"""Charts as inline SVG: pure functions from numbers to markup, coloured by the page's style sheet.

Charts in table rows use percentages horizontally, so that they fill any width with text of one size. All others are a `Plot`:
two axes with a grid in a `Frame`. On a page a plot is drawn twice (`both`), in the width of a page and of a phone, and the
style sheet shows the one that fits, so that text stays readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.words import typeset
from vlmcompress.evaluation.results import Comparison, Ratio
from vlmcompress.utils.text import figures, times
from vlmcompress.utils.text import points as in_points

if TYPE_CHECKING:
    from vlmcompress.evaluation.report.findings import AccuracyRow

_NARROW, _BROAD = "ijlftrI.,:;|!'()[] ", "mwMW%@\N{RIGHTWARDS ARROW}"
_WINNER, _FRONT, _OTHER = "#d55e00", "#0072b2", "#8a8a8a"  # Okabe and Ito's colours, without a style sheet


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Markup `<name a="b">children</name>`; `_` in a name becomes `-`, a trailing one is dropped, and None is left out.

    Text is escaped, and coordinates have at most two decimals.
    """
    parts = []
    for key, value in attributes.items():
        if isinstance(value, float):
            value = f"{value:.2f}".rstrip("0").rstrip(".")
        if value is not None:
            parts.append(Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value))
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(parts), inner)


def picture(label: str, width: int, height: int, *marks: Markup, font: int = 12, **attributes: object) -> Markup:
    """A standalone SVG, with text of `font` units. `label` describes the picture in words."""
    attributes = {"role": "img", "aria_label": label, "font_family": "system-ui, sans-serif", **attributes}
    box = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "style": f"font-size: {font}px"}
    return element("svg", element("title", label), *marks, **box, **attributes)


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, with ticks at round numbers, written by `text`. `share(value)` is in 0 to 1."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False
    text: Callable[[float], str] = words.brief

    def share(self, value: float) -> float:
        """The position of a value in 0 to 1, clamped to the axis."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear(low: float, high: float, count: int = 4) -> Axis:
    """An axis of about `count` steps of 1, 2, 2.5 or 5 times a power of ten, ends included."""
    if high - low < 1e-12:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    # Nice numbers for graph labels (Heckbert, Graphics Gems, 1990).
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    ticks = [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def logarithmic(low: float, high: float) -> Axis:
    """A logarithmic axis, with ticks at powers of ten, at 1, 2 and 5 if it is short, or evenly spaced if very short."""
    low, high = low / 1.03, max(high, low * 1.2) * 1.03
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5)):
        ticks = [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]
        if len(ticks) >= 3:
            return Axis(low, high, ticks[:: math.ceil(len(ticks) / 6)], log=True)
    return Axis(low, high, [tick for tick in linear(low, high, 5).ticks if low <= tick <= high], log=True)


class Box(NamedTuple):
    """A rectangle, in pixels from the top left."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        return max(0.0, across) * max(0.0, min(self.bottom, other.bottom) - max(self.top, other.top))


def width(text: str, size: float) -> float:
    """An upper estimate of a text's width in a sans-serif font of `size` pixels, measured on DejaVu Sans, a broad one."""
    return size * sum(0.4 if c in _NARROW else 1.0 if c in _BROAD else 0.78 if c.isupper() else 0.65 for c in text)


class Frame(NamedTuple):
    """Size of a plot and of its text, in units that are about pixels when shown; `name` is its CSS class, `right` the space
    for names right of the axes."""

    name: str
    width: int
    height: int
    font: int
    right: int = 14


PAGE = Frame("broad", 920, 480, 13)
HALF = Frame("half", 430, 340, 13)
PHONE = Frame("narrow", 300, 400, 12)
PANEL = Frame("panel", 320, 214, 13)


@dataclass(frozen=True)
class Dot:
    """A mark at (x, y), in the axes' units, with its tooltip.

    Attributes:
        low, high: ends of its error bar upwards; None: it has none.
        css: CSS classes of its kind; `colour`: of the mark and its bar without a style sheet.
        named: whether its name must be shown; other names are dropped if there is no space.
        strong: whether it is highlighted: larger, with a ring and a bold name.
        hollow: whether it is an outlined diamond instead of a disc.
    """

    name: str
    x: float
    y: float
    tooltip: str = ""
    low: float | None = None
    high: float | None = None
    css: str = ""
    colour: str = "#777"
    named: bool = True
    strong: bool = False
    hollow: bool = False


class Plot:
    """Two axes in a frame: `x` and `y` return the pixels of a value, `area` is the rectangle between the axes."""

    def __init__(self, across: Axis, up: Axis, frame: Frame) -> None:
        self.across, self.up, self.frame = across, up, frame
        left = max(width(up.text(tick), frame.font) for tick in up.ticks) + 10
        top = frame.font * (0.8 if frame is PANEL else 1.9)
        self.area = Box(left, top, frame.width - frame.right, frame.height - 3.4 * frame.font)

    def x(self, value: float) -> float:
        return self.area.left + (self.area.right - self.area.left) * self.across.share(value)

    def y(self, value: float) -> float:
        return self.area.bottom - (self.area.bottom - self.area.top) * self.up.share(value)

    def grid(self, across: str, up: str = "") -> Iterator[Markup]:
        """Draw the grid with as many tick labels as fit, and the names of both axes."""
        area, font = self.area, self.frame.font
        free = 0.0  # from where on a number has room
        for tick in self.across.ticks:
            x, text = self.x(tick), self.across.text(tick)
            half = width(text, font) / 2
            yield element("line", x1=x, x2=x, y1=area.top, y2=area.bottom, stroke="#8884", class_="grid")
            if x - half >= free:
                yield element("text", text, x=x, y=area.bottom + 1.4 * font, text_anchor="middle")
                free = x + half + 6
        for tick in self.up.ticks:
            y, kind = self.y(tick), "zero" if tick == 0 and self.up.low < 0 else "grid"
            yield element("line", x1=area.left, x2=area.right, y1=y, y2=y, stroke="#8884", class_=kind)
            yield element("text", self.up.text(tick), x=area.left - 7, y=y + 4, text_anchor="end")
        below = {"x": area.right, "y": self.frame.height - 0.4 * font, "text_anchor": "end"}
        yield element("text", f"{across} \N{RIGHTWARDS ARROW}", **below)
        if up:
            yield element("text", f"\N{UPWARDS ARROW} {up}", x=2, y=1.1 * font)

    def line(self, points: Iterable[tuple[float, float]], css: str, **look: object) -> Markup:
        """Draw a line from point to point."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return element("polyline", points=path, class_=css, **{"fill": "none", "stroke": "#888", **look})

    def along(self, points: Iterable[tuple[float, float]]) -> list[Box]:
        """Small boxes along the line from point to point, which names avoid."""
        return [box for a, b in pairwise((self.x(x), self.y(y)) for x, y in points) for box in _boxes_along(a, b)]

    def dots(self, dots: Sequence[Dot], keep_off: Sequence[Box] = ()) -> list[Markup]:
        """Draw dots with their bars, the first above the others, then their names, which avoid `keep_off`."""
        spots: list[tuple[float, float]] = []
        for dot in dots:
            at = self.x(dot.x)
            if dot.low is not None:  # bars that would overlap are shifted slightly, alternately right and left
                occupied = [x for (x, _), other in zip(spots, dots, strict=False) if other.low is not None]
                gap = 6 if self.frame is PAGE else 4
                free = (at + sign * step * gap for step in range(5) for sign in (1, -1))
                inside = (x for x in free if self.area.left + 5 <= x <= self.area.right + 8)
                at = next((x for x in inside if all(abs(x - other) > gap - 0.1 for other in occupied)), at)
            spots.append((at, self.y(dot.y)))
        marks = [self._dot(dot, *spot) for dot, spot in zip(dots, spots, strict=True)][::-1]
        return [*marks, *self._names(dots, spots, keep_off)]

    def _dot(self, dot: Dot, x: float, y: float) -> Markup:
        size, look, marks = 5.5 if dot.strong else 4.5, {"fill": dot.colour, "stroke": dot.colour}, []
        if dot.low is not None and dot.high is not None:
            faint = None if dot.named else 0.45
            bar = {"stroke": dot.colour, "stroke_width": 2.5 if dot.strong else 1.5, "opacity": faint, "class_": "bar"}
            marks.append(element("line", x1=x, x2=x, y1=self.y(dot.high), y2=self.y(dot.low), **bar))
        if dot.hollow:
            path = f"M{x:.1f} {y - 6:.1f}l5.5 6l-5.5 6l-5.5 -6Z"
            marks.append(element("path", d=path, **{**look, "fill": "none"}, stroke_width=1.5, class_="mark hollow"))
        else:
            marks.append(element("circle", cx=x, cy=y, r=size, **look, class_="mark"))
        if dot.strong:
            ring = {"fill": "none", "stroke": dot.colour, "stroke_width": 2, "class_": "ring"}
            marks.append(element("circle", cx=x, cy=y, r=9.5, **ring))
        return element("g", element("title", dot.tooltip or dot.name), *marks, class_=dot.css or None)

    def _names(
        self, dots: Sequence[Dot], spots: Sequence[tuple[float, float]], keep_off: Sequence[Box]
    ) -> Iterator[Markup]:
        """Place names next to, above or below their dots, required ones first, where they cover the least.

        Names never overlap. An optional name is dropped if it would cover a mark or be far away.
        """
        font, area = self.frame.font, self.area
        high, placed = 1.25 * font, list[Box]()
        marks = [*keep_off, *(Box(x - 6, y - 6, x + 6, y + 6) for x, y in spots)]
        for dot, (x, y) in sorted(zip(dots, spots, strict=True), key=lambda pair: not pair[0].named):
            long, best, away = width(dot.name, font) * (1.1 if dot.strong else 1.0), None, math.inf
            lefts = (x + 9, x - 9 - long, min(max(x - long / 2, area.left + 2), self.frame.width - long))
            for step in sorted(range(-30, 31) if dot.named else range(-2, 3), key=abs):
                top = y + (step - 0.5) * high
                for side, left in enumerate(lefts):
                    box = Box(left, top, left + long, top + high)
                    inside = area.left + 2 <= left and box.right <= self.frame.width
                    if not (inside and area.top <= top and box.bottom <= area.bottom):
                        continue
                    covered = sum(map(box.overlap, marks))
                    if any(map(box.overlap, placed)) or (covered and not dot.named):
                        continue
                    if (cost := abs(step) * high + covered + side + (9 * high if side == 2 and not step else 0)) < away:
                        best, away = box, cost
                if away <= abs(step) * high:
                    break
            if best is None or not dot.name:
                continue
            placed.append(best)
            near = min(max(x, best.left), best.right), min(max(y, best.top), best.bottom)
            if math.dist(near, (x, y)) > 14:
                marks += _boxes_along((x, y), near)
                yield element("line", x1=x, y1=y, x2=near[0], y2=near[1], stroke="#888", class_="lead")
            anchor, start = ("end", best.right) if best.right <= x else ("start", best.left)
            look = {"font_weight": 650 if dot.strong else None, "class_": f"name {dot.css}".strip(), "fill": dot.colour}
            yield element("text", dot.name, x=start, y=best.bottom - 0.35 * font, text_anchor=anchor, **look)

    def picture(self, label: str, *marks: Markup) -> Markup:
        """The SVG of these marks. `label` describes the plot in words."""
        frame = self.frame
        look: dict[str, Any] = {"font": frame.font, "fill": "#777", "class_": f"plot {frame.name}"}
        return picture(label, frame.width, frame.height, *marks, **look)


def _boxes_along(start: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    spots = np.linspace(start, end, 2 + int(math.dist(start, end) / 6)).tolist()
    return [Box(x - 1, y - 1, x + 1, y + 1) for x, y in spots]


def both(draw: Callable[[Frame], Markup], frame: Frame = PAGE) -> Markup:
    """Draw for a page and for a phone, of which the style sheet shows one; empty if there is nothing to draw."""
    return draw(frame) + draw(PHONE)


# Rows of tables


_EDGE = 6  # percent of a row's width, left free on both sides for half a label


def accuracy_axis(rows: Sequence[AccuracyRow]) -> Axis:
    """An axis for all intervals, zero and the first row's margin, but at most 30 points, so that an extreme family or the wide
    margin of families does not flatten the rest."""
    low = min(-0.01, -rows[0].comparison.margin, *(row.comparison.low for row in rows))
    high = max(0.01, *(row.comparison.high for row in rows))
    return replace(linear(max(low, -0.3), min(high, 0.3)), text=lambda v: typeset(in_points(v).removesuffix(".0")))


def gain_axis(rows: Sequence[Ratio]) -> Axis:
    """A logarithmic axis for ratios, with 1x inside."""
    ends = [words.gain_ratio(r, x) for r in rows if words.comparable(r) for x in (r.low, r.high)]
    return replace(logarithmic(min([0.9, *ends]), max([1.1, *ends])), text=_times)


def _times(value: float) -> str:
    return typeset(f"{words.brief(value)}x")


def ruler(axis: Axis, unit: str = "points") -> Markup:
    """An axis's labels, for a table's head."""
    halves = [(tick, "half" if i % 2 else None) for i, tick in enumerate(axis.ticks)]
    look: dict[str, Any] = {"y": 13, "text_anchor": "middle"}
    labels = [element("text", axis.text(t), x=_across(axis, t), class_=half, **look) for t, half in halves]
    return element("svg", *labels, class_="row ruler", role="img", aria_label=f"axis, {unit}")


def accuracy(row: AccuracyRow, axis: Axis) -> Markup:
    """A difference and its interval; zero is a line. For judged rows, the region beyond the margin is shaded."""
    c, shaded = row.comparison, []
    judged = f": {words.VERDICTS[c.verdict]}" * row.judged
    label = f"{in_points(c.difference)} points, {words.interval(c)}, p = {c.p:.3g}{judged}"
    if row.judged and -c.margin >= axis.low:
        shaded = [element("rect", x=0, y="-50%", width=_across(axis, -c.margin), height="200%", class_="lost")]
    tone = c.verdict if row.judged else "even"
    return _row(label, axis, 0.0, shaded, _whisker(axis, c.low, c.difference, c.high, tone))


def gain_chart(name: str, r: Ratio, axis: Axis) -> Markup:
    """A ratio, turned so that right is better; whiskers are the extremes of the repeats."""
    if not words.comparable(r):
        return _row(f"{words.metric_name(name)}: not comparable", axis, 1.0)
    low, high = sorted(words.gain_ratio(r, x) for x in (r.low, r.high))
    middle = words.gain_ratio(r, r.ratio)
    tone = "even" if words.unclear(r) else "pass" if middle > 1 else "fail"
    ends = f" ({spread} in the repeats)" if (spread := words.spread(r)) else ""
    label = f"{words.metric_name(name)}: {words.pace(r)}{ends}"
    return _row(label, axis, 1.0, (), _whisker(axis, low, middle, high, tone))


def _row(label: str, axis: Axis, zero: float, ground: Sequence[Markup] = (), *marks: Markup) -> Markup:
    places = [(tick, "grid") for tick in axis.ticks] + [(zero, "zero")]
    ends = {"y1": "-50%", "y2": "150%"}
    lines = [element("line", x1=_across(axis, v), x2=_across(axis, v), **ends, class_=kind) for v, kind in places]
    look = {"class_": "row", "role": "img", "aria_label": typeset(label)}
    return element("svg", element("title", typeset(label)), *ground, *lines, *marks, **look)


def _whisker(axis: Axis, low: float, middle: float, high: float, tone: str) -> Markup:
    line = element("line", x1=_across(axis, low), x2=_across(axis, high), y1="50%", y2="50%", class_="range")
    return element("g", line, element("circle", cx=_across(axis, middle), cy="50%", r=4.5), class_=tone)


def _across(axis: Axis, value: float) -> str:
    return f"{_EDGE + (100 - 2 * _EDGE) * axis.share(value):.2f}%"


# Panels of two sides


def cumulative(title: str, unit: str, runs: Mapping[str, Sequence[Sequence[float]]]) -> Markup:
    """The share of values below x, on a logarithmic axis, where a constant ratio of two sides is a constant distance.

    Args:
        runs: side ("baseline", "candidate") -> one list of values per repeat. Each repeat is a thin curve, all together a
            thick one; the median is marked and labelled. Values of zero count as the smallest positive one.
    """
    pooled = {side: np.concatenate([np.asarray(values, float) for values in lists]) for side, lists in runs.items()}
    positive = np.concatenate(list(pooled.values()))
    positive = positive[positive > 0]
    if positive.size == 0:
        return Markup("")
    axis = logarithmic(float(positive.min()), float(positive.max()))
    plot = Plot(
        axis, Axis(0, 1, [0, 0.5, 1], text=lambda share: f"{share:.0%}".removesuffix("%" * (share == 0))), PANEL
    )
    curves = [(values, f"{side} repeat") for side in runs for values in runs[side] if len(runs[side]) > 1]
    curves += [(values, f"{side} curve") for side, values in pooled.items()]
    marks, paths = list(plot.grid(unit)), []
    for values, css in curves:
        shares = np.linspace(0, 1, min(120, max(2, len(values))))
        quantiles = np.quantile(values, shares)
        path = [(float(quantiles[0]), 0.0), *zip(quantiles.tolist(), shares.tolist(), strict=True)]
        marks.append(plot.line(path, css))
        paths += plot.along(path) if "curve" in css else []
    medians = {side: float(np.median(values)) for side, values in pooled.items()}
    texts = {side: f"{figures(median)} {unit}".strip() for side, median in medians.items()}
    dots = [Dot(texts[side], median, 0.5, css=side) for side, median in medians.items()]
    label = f"{title}: " + ", ".join(f"{side} median {text}" for side, text in texts.items())
    return plot.picture(label, *marks, *plot.dots(dots, paths))


def histogram(title: str, unit: str, sides: Mapping[str, Sequence[float]]) -> Markup:
    """Counts in at most 24 common bins: the baseline filled, the candidate as an outline over it."""
    low, high = (float(end(map(end, sides.values()))) for end in (min, max))
    edges = np.linspace(low, high + 1, int(min(24, max(1, high - low + 1))) + 1)
    counts = {side: np.histogram(values, edges)[0].tolist() for side, values in sides.items()}
    plot = Plot(linear(low, high + 1), linear(0, max(1, *map(max, counts.values())), 2), PANEL)
    marks = list(plot.grid(unit))
    for side, heights in counts.items():
        ends = zip(np.repeat(edges, 2).tolist(), [0, *np.repeat(heights, 2).tolist(), 0], strict=True)
        marks.append(plot.line(ends, f"{side} bars"))
    label = f"{title}: " + ", ".join(f"{side} {min(v):,.0f} to {max(v):,.0f}" for side, v in sides.items())
    return plot.picture(label, *marks)


# Choices


class Point(NamedTuple):
    """A compared run: its `gain_chart` (more is better, 1 is the baseline) and its difference in accuracy."""

    name: str
    gain: float
    accuracy: Comparison


def undominated(points: Sequence[Point]) -> list[Point]:
    """The Pareto front, by ascending gain: points that no other dominates."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.gain, -p.accuracy.difference)):
        if not best or point.accuracy.difference > best[-1].accuracy.difference:
            best.append(point)
    return best[::-1]


def pareto(points: Sequence[Point], what: str, margin: float, frame: Frame = HALF) -> Markup:
    """Compared runs by gain (`what` is its name, "times smaller") and accuracy; the baseline is at (1, 0).

    For more than 12 runs only those on the front must be named; the tables have all.
    """
    across = logarithmic(min(1.0, *(p.gain for p in points)), max(1.05, *(p.gain for p in points)))
    lows, highs = [p.accuracy.low for p in points], [p.accuracy.high for p in points]
    up = linear(100 * max(-0.4, min(-1.3 * margin, *lows)), 100 * min(0.4, max(0.005, *highs)))
    plot = Plot(replace(across, text=_times), replace(up, text=_signed), frame)
    area, limit, best, dots, labels = plot.area, plot.y(-100 * margin), undominated(points), [], []
    for name, ratio, c in sorted(points, key=lambda point: point not in best):
        label = f"{name} {times(ratio)}, {in_points(c.difference)} points"
        tooltip = typeset(f"{label}, {words.VERDICTS[c.verdict]}")
        named = len(points) <= 12 or (name, ratio, c) in best
        dots.append(Dot(name, ratio, 100 * c.difference, tooltip, 100 * c.low, 100 * c.high, c.verdict, named=named))
        labels.append(label)
    lost = {"x": area.left, "width": area.right - area.left, "y": limit, "height": max(0.0, area.bottom - limit)}
    front = [(p.gain, 100 * p.accuracy.difference) for p in best]
    marks = [
        element("rect", **lost, class_="lost"),
        *plot.grid(what, "points of accuracy"),
        plot.line(front, "front", stroke_dasharray="5 4"),
        element("circle", cx=plot.x(1.0), cy=plot.y(0.0), r=4.5, class_="origin"),
        *plot.dots(dots, plot.along(front)),
    ]
    return plot.picture(typeset(f"Accuracy against {what}: " + "; ".join(labels)), *marks)


def front(
    candidates: Sequence[Mapping[str, Any]],
    max_drop: float,
    gain: str,
    confirmed: Mapping[str, Any] | None = None,
    frame: Frame = PAGE,
) -> Markup:
    """The candidates of a search that answered questions, as in `search.outcome.plain`, with their Pareto front joined.

    Error bars of few answers end at the chart's edge, 10 points away, rather than flatten the rest.

    Args:
        max_drop: the floor, as a share.
        gain: the axis label of the gain.
        confirmed: the winner's answers to other questions: `questions`, `difference`, `low`, `high`.
    """
    rows = sorted(
        (row for row in candidates if row["questions"]), key=lambda row: (not row["winner"], not row["front"])
    )
    if not rows:
        return Markup("")
    dots = []
    for row in rows:
        tooltip = f"{row['name']}: {times(row['gain'])}, {in_points(row['believed'])} points"
        colour = _WINNER if row["winner"] else _FRONT if row["front"] else _OTHER
        look = {"colour": colour, "named": row["winner"] or row["front"], "strong": row["winner"]}
        ends = 100 * row["low"], 100 * row["high"]
        dots.append(Dot(row["name"], row["gain"], 100 * row["believed"], tooltip, *ends, **look))
    if confirmed and rows[0]["winner"]:
        change, low, high = (confirmed[key] for key in ("difference", "low", "high"))
        name = f"on {confirmed['questions']:,} other questions"
        tooltip = f"{name}: {in_points(change)} points ({in_points(low)} to {in_points(high)})"
        dots.insert(1, Dot(name, dots[0].x, 100 * change, tooltip, 100 * low, 100 * high, colour=_WINNER, hollow=True))
    bars = [min(10, max(-10, end)) for dot in dots if dot.named for end in (dot.low, dot.high) if end is not None]
    heights = [dot.y for dot in dots] + bars
    across = replace(linear(1.0, max(1.2, *(dot.x for dot in dots)), 6), text=_times)
    up = replace(linear(min(-150 * max_drop, *heights), max(0.5, *heights), 6), text=_signed)
    plot = Plot(across, up, frame)
    floor, area = plot.y(-100 * max_drop), plot.area
    word = Box(area.left + 4, floor - 1.2 * frame.font, area.left + 4 + width("floor", frame.font), floor)
    best = sorted((row for row in rows if row["front"]), key=lambda row: row["gain"])
    joined = [(row["gain"], 100 * row["believed"]) for row in best]
    marks = [
        *plot.grid(gain, "difference, points"),
        element("line", x1=area.left, x2=area.right, y1=floor, y2=floor, stroke=_WINNER, stroke_dasharray="2 4"),
        element("text", "floor", x=word.left, y=floor - 4, fill=_WINNER, class_="floor"),
        plot.line(joined, "front", stroke_dasharray="5 4"),
        *plot.dots(dots, [word, *plot.along(joined)]),
    ]
    names = "; ".join(f"{row['name']} {times(row['gain'])} {in_points(row['believed'])} points" for row in best)
    label = f"Difference in accuracy against gain ({gain}) of {len(rows)} candidates; the front: {names}"
    return plot.picture(label, *marks)


def _signed(value: float) -> str:
    return typeset("+" * (value > 0) + words.brief(value))

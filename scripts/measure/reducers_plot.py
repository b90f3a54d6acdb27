"""Plot figures of reducers as SVG, a panel a model: exact match against the share of visual rows in caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vlmcompress.evaluation.report.charts import Axis, element, linear, picture

WIDTH, HEIGHT = 520, 440  # size of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND = 44, 12, 34, 42, 150
LOOKS = {  # group -> colour (Okabe and Ito's, which readers of any colour vision tell apart, and greys), dashes
    "random": ("#999999", None),
    "uniform": ("#999999", "2 3"),
    "dart": ("#0072b2", None),
    "dart pivots=4": ("#0072b2", "9 3 2 3"),
    "dart-llm": ("#0072b2", "6 3"),
    "dart-llm layer=1": ("#0072b2", "2 3"),
    "coverage": ("#f0e442", None),
    "coverage merge=nearest": ("#f0e442", "6 3"),
    "divprune": ("#009e73", None),
    "fastv": ("#d55e00", "6 3"),
    "fastv layer=1": ("#d55e00", "2 3"),
    "pyramiddrop": ("#d55e00", None),
    "relevance": ("#cc79a7", None),
    "visionzip": ("#e69f00", None),
    "vscan": ("#e69f00", "2 3"),
    "tome": ("#56b4e9", None),
    "dymu": ("#56b4e9", "2 3"),
    "dyrate": ("#000000", "6 3"),
}


def draw(results: Mapping[str, Any], looks: Mapping[str, tuple[str, str | None]] = LOOKS) -> str:
    """Draw the whole picture; the line of a reducer begins at the model without one.

    `looks`: the groups to draw, with colour and dashes.
    """
    models, figures = list(results["full"]), [row for row in results["figures"] if row["group"] in looks]
    values = [row["exact"]["all"] for row in (*figures, *({"exact": full} for full in results["full"].values()))]
    up, across = linear(min(values), max(values), 6), linear(0.0, 1.0, 5)
    panels = [
        element(
            "g",
            *_panel(
                model,
                results["full"][model]["all"],
                [row for row in figures if row["model"] == model],
                across,
                up,
                looks,
            ),
            transform=f"translate({number * WIDTH} 0)",
        )
        for number, model in enumerate(models)
    ]
    drawn = {name: look for name, look in looks.items() if any(row["group"] == name for row in figures)}
    legend = element("g", *_legend(drawn), transform=f"translate({len(models) * WIDTH + 8} {_TOP})")
    label = "Exact match against the share of visual tokens in the caches, by reducer"
    width = len(models) * WIDTH + _LEGEND
    paper = element("rect", width=width, height=HEIGHT, fill="#fff")
    return f"{picture(label, width, HEIGHT, paper, *panels, legend, fill='#333')}\n"


def _panel(
    model: str, full: float, figures: Sequence[Mapping[str, Any]], across: Axis, up: Axis,
    looks: Mapping[str, tuple[str, str | None]],
) -> list[Markup]:  # fmt: skip
    marks, floor, right = [], HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for tick in up.ticks:
        y = _y(up, tick)
        marks.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, stroke="#ddd"))
        marks.append(element("text", f"{100 * tick:.0f}%", x=_LEFT - 6, y=y + 4, text_anchor="end"))
    for tick in across.ticks:
        x = _x(across, tick)
        marks.append(element("line", x1=x, x2=x, y1=_TOP, y2=floor, stroke="#ddd"))
        marks.append(element("text", f"{100 * tick:.0f}%", x=x, y=floor + 16, text_anchor="middle"))
    marks.append(element("text", model, x=_LEFT, y=20, font_weight="bold"))
    below = "visual tokens that the caches of all layers hold"
    marks.append(element("text", below, x=right, y=HEIGHT - 8, text_anchor="end"))
    for group, (colour, dashes) in looks.items():
        curve = sorted((row for row in figures if row["group"] == group), key=lambda row: -row["cached"])
        places = [(_x(across, row["cached"]), _y(up, row["exact"]["all"])) for row in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(_x(across, 1.0), _y(up, full)), *places])
        if curve:
            marks.append(
                element("polyline", points=line, fill="none", stroke=colour, stroke_width=1.8, stroke_dasharray=dashes)
            )
        for row, (x, y) in zip(curve, places, strict=True):
            says = f"{row['reduce']}: {100 * row['exact']['all']:.1f}%, {100 * row['kept']:.0f}% kept"
            marks.append(element("circle", element("title", says), cx=x, cy=y, r=3, fill=colour))
    return marks


def _legend(looks: Mapping[str, tuple[str, str | None]]) -> list[Markup]:
    marks = []
    for number, (name, (colour, dashes)) in enumerate(looks.items()):
        y = 19 * number
        marks.append(element("line", x1=0, x2=26, y1=y, y2=y, stroke=colour, stroke_width=2, stroke_dasharray=dashes))
        marks.append(element("text", name, x=32, y=y + 4))
    return marks


def _x(axis: Axis, value: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * axis.share(value)


def _y(axis: Axis, value: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - axis.share(value))

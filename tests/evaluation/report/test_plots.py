"""Plots of a search and a comparison: names that can be read on a page and on a phone, and what is marked."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup
from PIL import ImageFont

from tests.kit.made_results import comparison, make_results
from vlmcompress.evaluation.report import html, panels, scatter, search
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.plot import HALF, PAGE, PHONE, Frame, Name, place
from vlmcompress.evaluation.report.scatter import front
from vlmcompress.evaluation.report.svg import Box, width
from vlmcompress.evaluation.search.outcome import mark

ROOT = Path(__file__).parents[3]
PHONE_PIXELS = 297  # what a figure has on a screen of 360 pixels, by the margins in style.css
SVG = "{http://www.w3.org/2000/svg}"


def candidates() -> list[dict[str, Any]]:
    """Recipes of demo-llava with their measured accuracy, as a search would list them."""
    measured = json.loads((ROOT / "eval" / "accuracy.json").read_text())
    rows = []
    for row in (row for row in measured if row["model"] == "demo-llava"):
        o = row["overall"]
        shared = {"believed": o["difference"], "front": False, "winner": False, "rough": False, "chance": 0.5}
        figures = {"name": row["recipe"], "gain": row["ratio"], "questions": o["n"], "difference": o["difference"]}
        rows.append({**figures, "low": o["low"], "high": o["high"], "divergence": 0.01, "why": "behind", **shared})
    mark(rows)
    winner = max((row for row in rows if row["low"] > -0.02), key=lambda row: row["gain"])
    winner.update(winner=True, why="")
    return rows


CONFIRMED = {"verdict": "inconclusive", "questions": 1500, "difference": -0.006, "low": -0.025, "high": 0.01}


EQUAL = [scatter.Point(name, 1.96, comparison("awq")) for name in ("rtn", "gptq", "awq", "awq-block")]


def measured(frame: Frame) -> Markup:
    runs = [
        scatter.Point(
            row["name"], row["gain"], comparison("awq", difference=row["difference"], low=row["low"], high=row["high"])
        )
        for row in candidates()[:8]
    ]
    return scatter.pareto(runs, "times smaller", 0.01, frame)


DRAWN: dict[str, Callable[[Frame], Markup]] = {
    "search": lambda frame: front(candidates(), 0.02, "requests a second", CONFIRMED, frame),
    "comparison": measured,
    "equal runs": lambda frame: scatter.pareto(EQUAL, "times smaller", 0.01, frame),
}


def parse(markup: object) -> ElementTree.Element:
    return ElementTree.fromstring(str(markup))


def texts(svg: ElementTree.Element) -> list[tuple[str, Box]]:
    """Texts with the boxes that a real font gives them."""
    size = float(re.findall(r"font-size: ([\d.]+)px", svg.get("style", ""))[0])
    font, boxes = ImageFont.load_default(10 * size), []  # so large that hinting does not count
    for text in svg.iter(f"{SVG}text"):
        x, y, long = float(text.get("x", "")), float(text.get("y", "")), font.getlength(text.text or "") / 10
        left = x - {"end": long, "middle": long / 2}.get(text.get("text-anchor", ""), 0.0)
        boxes.append((text.text or "", Box(left, y - 0.75 * size, left + long, y + 0.2 * size)))
    return boxes


@pytest.mark.parametrize("frame", [PAGE, HALF, PHONE], ids=lambda frame: frame.name)
@pytest.mark.parametrize("name", DRAWN)
def test_no_text_covers_another_or_leaves_the_drawing(name: str, frame: Frame) -> None:
    boxes = texts(parse(DRAWN[name](frame)))
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        assert not a.shared(b), (first, second)
    assert all(box.within(Box(0, 0, frame.width + 4, frame.height)) for _, box in boxes)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 290), st.integers(20, 380), st.booleans()), min_size=1, max_size=14))
def test_names_never_overlap_and_optional_ones_keep_off_dots(spots: list[tuple[int, int, bool]]) -> None:
    names = [Name(f"recipe w{i} g128", x, y, needed) for i, (x, y, needed) in enumerate(spots)]
    marks, frame = [Box(x - 6, y - 6, x + 6, y + 6) for x, y, _ in spots], Box(0, 0, 300, 400)
    placed = place(names, marks, frame, 12)
    assert placed == place(names, marks, frame, 12)
    assert all(not a.shared(b) for (_, a), (_, b) in itertools.combinations(placed, 2))
    assert all(box.within(frame) for _, box in placed)
    assert not any(box.shared(mark) for name, box in placed if not name.needed for mark in marks)
    assert {name for name in names if name.needed} <= {name for name, _ in placed}, "room for 14 is there"


def test_widths_are_upper_estimates() -> None:
    names = [row["name"] for row in candidates()] + ["gptq-plus + coverage:1/9,merge=mean"]
    for name in names:
        assert width(name, 1) >= ImageFont.load_default(100).getlength(name) / 100, name


def test_text_is_large_enough_on_every_screen() -> None:
    """At least 11 pixels: on a phone of 360, and on the narrowest screen that is shown the broad drawing."""
    style = Path(html.__file__).with_name("style.css").read_text()
    narrow = (
        int(re.findall(r"@media screen and \(max-width: (\d+)rem\) \{\s*\.plot:is\(\.broad, \.half\)", style)[0]) * 16
    )
    least = {PAGE: narrow - 2 * 19.2 - 34, HALF: 25 * 16 - 34, PHONE: PHONE_PIXELS}  # of a panel of at least 25rem
    for frame, pixels in least.items():
        assert frame.font * min(1.0, pixels / frame.width) >= 11, frame
    assert panels.FONT * PHONE_PIXELS / panels.WIDTH >= 11
    assert ".plot.narrow { display: none;" in style and ".plot.narrow { display: block; }" in style


def test_a_search_shows_error_bars_names_and_a_verdict() -> None:
    rows = candidates()
    for frame in (PAGE, PHONE):
        svg = parse(front(rows, 0.02, "requests a second", CONFIRMED, frame))
        bars = [line for line in svg.iter(f"{SVG}line") if line.get("class") == "bar"]
        assert len(bars) == len(rows) + 1, "the winner's other questions have one, too"
        strong = [bar for bar in bars if bar.get("stroke") != "#8a8a8a"]  # the others may end at the chart's edge
        lengths = sorted(float(bar.get("y2", "")) - float(bar.get("y1", "")) for bar in strong)
        shown_rows = [row for row in rows if row["winner"] or row["front"]]
        widths = sorted(row["high"] - row["low"] for row in [*shown_rows, CONFIRMED])
        assert [length / lengths[-1] for length in lengths] == pytest.approx([w / widths[-1] for w in widths], rel=0.01)
        shown = {text for text, _ in texts(svg)}
        assert {row["name"] for row in rows if row["winner"] or row["front"]} | {"on 1,500 other questions"} <= shown
        assert len(svg.findall(f".//{SVG}circle[@class='ring']")) == 1


def test_the_page_of_a_search_says_its_verdict_in_a_badge() -> None:
    request = {"model": "demo-llava", "target": "cpu", "max_drop": 0.02, "optimize": "memory", "gains": "modelled"}
    counts = {"questions": {"search": 900, "asked": 900, "full_grid": 9000}, "seconds": 60.0, "left_out": {}}
    rest = {"ended_by_budget": False, "one_more_point": None, "nearest": None, "rate": None}
    data = {**request, **counts, **rest, "candidates": candidates(), "winner": {"name": "x"}}
    text = search.page({**data, "confirmed": {**CONFIRMED, "images": 500, "missing": 70, "unit": "images"}})
    assert 'class="pill inconclusive"' in text and 'class="verdict inconclusive"' in text
    assert "on 1,500 other questions about 500 images" in text and "about 70 more images would decide" in text
    assert text.count("<svg") == 2 and "pill" not in search.page(data).partition("<main>")[2]


class Rows(HTMLParser):
    """The texts of each row of tables, without cells that a class hides."""

    def __init__(self, text: str, hidden: str) -> None:
        super().__init__()
        self.hidden, self.rows, self.skip = hidden, [""], ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = str(dict(attrs).get("class") or "").split()
        if tag == "tr" and not self.skip and "stacked" not in classes:
            self.rows.append("")
        if tag in ("tr", "td", "th") and self.hidden in classes and not self.skip:
            self.skip = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self.skip:
            self.skip = ""

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.rows[-1] += f" {data.strip()}"


@pytest.mark.parametrize("hidden", ["stacked", "minor"], ids=["page", "phone"])
def test_each_family_shows_its_samples_difference_and_interval(hidden: str) -> None:
    rows = Rows(html.page(Findings(make_results())), hidden).rows
    for family in ("chart", "count"):
        (row,) = (row for row in rows if row.startswith(f" {family} "))
        assert re.search(r"\b90\b", row) and "−5.1 to +5.1" in row and re.search(r"(?<![\d.+−])0\.0\b", row), row
    (speed, *_) = (row for row in rows if row.startswith(" requests/s "))
    assert hidden == "stacked" or "in the repeats" in speed

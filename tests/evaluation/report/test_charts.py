"""Charts: what is drawn where, read back from the markup, and names that can be read on a page and on a phone."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup
from PIL import ImageFont

from tests.kit.made_results import HOSTILE, comparison, layer_errors, make_bench, make_results
from vlmcompress.evaluation.report import charts, heatmap, html, search
from vlmcompress.evaluation.report.charts import HALF, PAGE, PANEL, PHONE, Box, Dot, Frame, element, linear, logarithmic
from vlmcompress.evaluation.report.findings import AccuracyRow, Findings
from vlmcompress.evaluation.search.outcome import mark


def parse(markup: object) -> ElementTree.Element:
    """Without the namespace that makes it a file of its own."""
    return ElementTree.fromstring(str(markup).replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def across(mark: ElementTree.Element, name: str) -> float:
    return float(mark.get(name, "").removesuffix("%"))


def points(line: ElementTree.Element) -> np.ndarray:
    return np.array([[float(x) for x in pair.split(",")] for pair in line.get("points", "").split()])


def test_element_escapes_text_and_attributes() -> None:
    result = parse(element("text", HOSTILE.translate({0: None, 27: None}), title='"<&', x=0.125, y=None, class_="a"))
    assert result.attrib == {"title": '"<&', "x": "0.12", "class": "a"} and "<script>" in (result.text or "")


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_linear_axis_holds_its_range_with_few_round_ticks(low: float, width: float) -> None:
    axis = linear(low, low + width)
    slack = 1e-6 * max(abs(low), width)
    assert axis.low <= low + slack and axis.high >= low + width - slack and 2 <= len(axis.ticks) <= 7
    assert axis.share(axis.low) == 0 and axis.share(axis.high) == 1


@given(st.floats(1e-9, 1e6), st.floats(1, 1e9))
def test_logarithmic_axis_holds_its_range_with_few_ticks(low: float, factor: float) -> None:
    axis = logarithmic(low, low * factor)
    assert axis.low <= low and axis.high >= low * factor * (1 - 1e-9)
    assert 1 <= len(axis.ticks) <= 7 and all(axis.low <= tick <= axis.high for tick in axis.ticks)


def test_interval_is_to_scale() -> None:
    broken = comparison("broken")
    axis = linear(-0.1, 0.1)
    svg = parse(charts.accuracy(AccuracyRow("all", broken, True), axis))
    group = svg.find("g")
    assert group is not None and group.get("class") == "fail"
    line, dot = group.find("line"), group.find("circle")
    assert line is not None and dot is not None
    left, right, middle = across(line, "x1"), across(line, "x2"), across(dot, "cx")
    share = (broken.difference - broken.low) / (broken.high - broken.low)
    assert (middle - left) / (right - left) == pytest.approx(share, abs=1e-3)
    lost = svg.find("rect")
    assert lost is not None and across(lost, "width") == pytest.approx(6 + 88 * (axis.share(-0.01)), abs=0.01)
    assert "−4.2 points" in (svg.findtext("title") or "")


def test_accuracy_axis_is_not_flattened_by_one_wild_family() -> None:
    axis = charts.accuracy_axis(
        [AccuracyRow("all", comparison("awq"), True), AccuracyRow("x", comparison("broken", low=-0.9), False)]
    )
    assert axis.low == pytest.approx(-0.3, abs=0.11)


def test_a_row_that_is_not_judged_has_no_verdict_and_no_margin() -> None:
    broken = comparison("broken")
    axis = linear(-0.1, 0.1)
    svg = parse(charts.accuracy(AccuracyRow("chart", broken, False), axis))
    group = svg.find("g")
    assert group is not None and group.get("class") == "even" and svg.find("rect") is None
    assert (svg.findtext("title") or "").endswith("p = 0.000137")
    wide = broken.model_copy(update={"margin": 0.3})  # beyond the axis: nothing of the chart is
    assert parse(charts.accuracy(AccuracyRow("chart", wide, True), axis)).find("rect") is None


def test_cumulative_curve_is_the_empirical_distribution() -> None:
    rng = np.random.default_rng(0)
    sides = {
        "baseline": [rng.lognormal(6, 0.4, 50), rng.lognormal(6, 0.4, 50)],
        "candidate": [rng.lognormal(5.5, 0.4, 90)],
    }
    svg = parse(charts.cumulative("first token", "ms", sides))
    lines = {line.get("class"): points(line) for line in svg.findall("polyline")}
    assert sum(line.get("class") == "baseline repeat" for line in svg.findall("polyline")) == 2
    assert "candidate repeat" not in lines
    everything = np.concatenate([v for lists in sides.values() for v in lists])
    axis = logarithmic(everything.min(), everything.max())
    pooled = np.sort(np.concatenate(sides["baseline"]))
    top, bottom = lines["baseline curve"][:, 1].min(), lines["baseline curve"][:, 1].max()
    left, right = next(
        (across(line, "x1"), across(line, "x2")) for line in svg.iter("line") if line.get("x1") != line.get("x2")
    )
    for x, y in lines["baseline curve"][1::10]:
        value = np.exp(np.log(axis.low) + (x - left) / (right - left) * np.log(axis.high / axis.low))
        assert np.mean(pooled <= value) == pytest.approx((bottom - y) / (bottom - top), abs=0.02)
    assert {text.text for text in svg.findall("text[@class]")} == {
        f"{np.median(np.concatenate(lists)):.0f} ms" for lists in sides.values()
    }


def test_cumulative_curve_of_nothing_positive_is_no_chart() -> None:
    assert charts.cumulative("divergence", "nats", {"candidate": [[0.0, 0.0]]}) == ""


def test_histogram_counts_everything() -> None:
    values = [80, 80, 81, 85, 90, 90, 90]
    svg = parse(charts.histogram("prompt tokens", "tokens", {"baseline": values, "candidate": values}))
    bars = [points(line) for line in svg.findall("polyline")]
    assert len(bars) == 2 and np.array_equal(*bars)
    steps = bars[0][1:-1].reshape(-1, 2, 2)
    heights = bars[0][0, 1] - steps[:, 0, 1]
    unit = heights[heights > 0].min()
    assert np.round(heights / unit).astype(int).tolist() == [2, 1, 0, 0, 0, 1, 0, 0, 0, 0, 3]


@pytest.mark.parametrize(
    "layer, place",
    [
        ("model.language_model.layers.3.mlp.down_proj", ("language_model", 3, "mlp.down_proj")),
        ("model.visual.blocks.31.attn.qkv", ("visual", 31, "attn.qkv")),
        ("model.vision_tower.vision_model.encoder.layers.0.mlp.fc1", ("vision_tower.vision_model", 0, "mlp.fc1")),
        ("model.multi_modal_projector.linear_1", ("multi_modal_projector", 0, "linear_1")),
        ("model.layers.5.mlp.experts.17.down_proj", ("model.layers", 5, "mlp.experts.*.down_proj")),
        ("lm_head", ("lm_head", 0, "lm_head")),
    ],
)
def test_layer_names(layer: str, place: tuple[str, int, str]) -> None:
    assert heatmap.split(layer) == place


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (123.4, "123"),
        (9.96, "10"),
        (1.04, "1.0"),
        (0.999, "1.0"),
        (0.1234, "0.12"),
        (0.034, "0.03"),
        (0.00034, "0.0003"),
        (3e-5, "<0.0001"),
    ],
)
def test_numbers_of_cells(value: float, written: str) -> None:
    assert heatmap.compact(value) == written


def test_maps_have_a_cell_a_layer_and_the_worst_expert() -> None:
    """The deeper the larger the error, from 0.06 to 1; numbers are in percent, as far as cells are broad enough for them."""
    errors = layer_errors() | {f"model.layers.0.mlp.experts.{i}.up": {"text": 0.001 * i} for i in range(1, 9)}
    grids = heatmap.grids(errors)
    assert [(g.part, g.modality, g.blocks) for g in grids] == [
        ("language_model", "text", 4),
        ("language_model", "vision", 4),
        ("model.layers", "text", 1),
    ]
    assert grids[2].cells == {"mlp.experts.*.up": {0: 0.008}}
    scale = heatmap.extremes(grids)
    cells = [cell for row in heatmap.errors(grids[1], scale).values() for cell in row.values()]
    flat = [error for row in grids[1].cells.values() for error in row.values()]
    assert len(cells) == 16 and np.all(np.diff(np.array([cell.shade for cell in cells])[np.argsort(flat)]) >= 0)
    assert heatmap.strength(scale[0], scale) == pytest.approx(0.06) and heatmap.strength(scale[1], scale) == 1.0
    for blocks, written in ((4, True), (80, False)):
        candidate = make_results().candidate.model_copy(update={"layer_errors": layer_errors(blocks)})
        table = html.report_page(Findings(make_results(candidate=candidate))).partition('<table class="heat"')[2]
        texts = re.findall(r'title="[^"]*">([^<]*)</td>', table.partition("</table>")[0])
        assert len(texts) == 4 * blocks and all(bool(text) == written for text in texts)


def test_legends_are_in_equal_factors() -> None:
    errors = heatmap.legend((0.0001, 0.01))
    assert [swatch.text for swatch in errors] == ["0.0100%", "0.0316%", "0.100%", "0.316%", "1.00%"]
    assert np.allclose([swatch.shade for swatch in errors], np.linspace(0.06, 1, 5))
    assert [swatch.text for swatch in heatmap.legend((0.01, 0.01))] == ["1.00%"]
    changes = heatmap.change_legend(4.0)
    assert [s.text for s in changes] == ["0.25x", "0.50x", "unchanged", "2.00x", "4.00x"]
    assert [s.kind for s in changes] == ["gain", "gain", "", "loss", "loss"]
    assert [s.text for s in heatmap.change_legend(1.0)] == ["unchanged"]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(-5, 5)), min_size=1, max_size=8))
def test_front_is_what_nothing_beats(pairs: list[tuple[int, int]]) -> None:
    runs = [charts.Point(str(i), gain, comparison("awq", difference=d / 100)) for i, (gain, d) in enumerate(pairs)]
    best = {(gain, d) for gain, d in pairs if not any(g >= gain and e >= d and (g, e) != (gain, d) for g, e in pairs)}
    front = [(p.gain, round(100 * p.accuracy.difference)) for p in charts.undominated(runs)]
    assert set(front) == best and front == sorted(front)


def test_a_side_without_a_good_request_has_no_dot() -> None:
    dead = make_bench().summary["serve"]["cold"]["request_throughput"].model_copy(update={"ratio": 0.0, "low": 0.0})
    svg = parse(charts.gain_chart("request_throughput", dead, charts.gain_axis([dead])))
    assert svg.find(".//circle") is None and "not comparable" in (svg.findtext("title") or "")


def test_gain_axis_has_the_baseline_and_all_repeats() -> None:
    rows = [r for states in make_bench(1.9).summary.values() for metrics in states.values() for r in metrics.values()]
    axis = charts.gain_axis(rows)
    assert axis.low < 1 < axis.high and any(tick == pytest.approx(1) for tick in axis.ticks)
    assert axis.high >= max(1 / r.low if not r.higher_is_better else r.high for r in rows)


ROOT = Path(__file__).parents[3]
PHONE_PIXELS = 297  # what a figure has on a screen of 360 pixels, by the margins in style.css


def candidates() -> list[dict[str, Any]]:
    """Recipes of demo-llava with their measured accuracy, as a search would list them."""
    measured = json.loads((ROOT / "eval" / "accuracy.json").read_text())
    rows = []
    for row in (row for row in measured if row["model"] == "llava"):
        o = row["overall"]
        shared = {"believed": o["difference"], "front": False, "winner": False, "rough": False, "chance": 0.5}
        figures = {"name": row["recipe"], "gain": row["ratio"], "questions": o["n"], "difference": o["difference"]}
        rows.append({**figures, "low": o["low"], "high": o["high"], "divergence": 0.01, "why": "behind", **shared})
    mark(rows)
    winner = max((row for row in rows if row["low"] > -0.02), key=lambda row: row["gain"])
    winner.update(winner=True, why="")
    return rows


CONFIRMED = {"verdict": "inconclusive", "questions": 1500, "difference": -0.006, "low": -0.025, "high": 0.01}


EQUAL = [charts.Point(name, 1.96, comparison("awq")) for name in ("rtn", "gptq", "awq", "awq-block")]


def measured(frame: Frame) -> Markup:
    runs = [
        charts.Point(
            row["name"], row["gain"], comparison("awq", difference=row["difference"], low=row["low"], high=row["high"])
        )
        for row in candidates()[:8]
    ]
    return charts.pareto(runs, "times smaller", 0.01, frame)


DRAWN: dict[str, Callable[[Frame], Markup]] = {
    "search": lambda frame: charts.front(candidates(), 0.02, "requests a second", CONFIRMED, frame),
    "comparison": measured,
    "equal runs": lambda frame: charts.pareto(EQUAL, "times smaller", 0.01, frame),
}


def texts(svg: ElementTree.Element) -> list[tuple[str, Box]]:
    """Texts with the boxes that a real font gives them."""
    size = float(re.findall(r"font-size: ([\d.]+)px", svg.get("style", ""))[0])
    font, boxes = ImageFont.load_default(10 * size), []  # so large that hinting does not count
    for text in svg.iter("text"):
        x, y, long = float(text.get("x", "")), float(text.get("y", "")), font.getlength(text.text or "") / 10
        left = x - {"end": long, "middle": long / 2}.get(text.get("text-anchor", ""), 0.0)
        boxes.append((text.text or "", Box(left, y - 0.75 * size, left + long, y + 0.2 * size)))
    return boxes


@pytest.mark.parametrize("frame", [PAGE, HALF, PHONE], ids=lambda frame: frame.name)
@pytest.mark.parametrize("name", DRAWN)
def test_no_text_covers_another_or_leaves_the_drawing(name: str, frame: Frame) -> None:
    boxes = texts(parse(DRAWN[name](frame)))
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        assert not a.overlap(b), (first, second)
    assert all(a.left >= 0 and a.right <= frame.width + 4 and a.top >= 0 and a.bottom <= frame.height for _, a in boxes)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 290), st.integers(20, 380), st.booleans()), min_size=1, max_size=14))
def test_names_never_overlap_and_needed_ones_are_there(spots: list[tuple[int, int, bool]]) -> None:
    plot = charts.Plot(linear(0, 300), linear(0, 400), PHONE)
    dots = [Dot(f"w{i} g128", x, y, named=named) for i, (x, y, named) in enumerate(spots)]
    svg = parse(plot.picture("", *plot.dots(dots)))
    boxes = texts(svg)
    assert {dot.name for dot in dots if dot.named} <= {name for name, _ in boxes}, "room for 14 is there"
    assert all(not a.overlap(b) for (_, a), (_, b) in itertools.combinations(boxes, 2))


def test_widths_are_upper_estimates() -> None:
    names = [row["name"] for row in candidates()] + ["gptq-plus + coverage:1/9,merge=mean"]
    for name in names:
        assert charts.width(name, 1) >= ImageFont.load_default(100).getlength(name) / 100, name


def test_text_is_large_enough_on_every_screen() -> None:
    """At least 11 pixels: on a phone of 360, and on the narrowest screen that is shown the broad drawing."""
    style = Path(html.__file__).with_name("style.css").read_text()
    narrow = (
        int(re.findall(r"@media screen and \(max-width: (\d+)rem\) \{\s*\.plot:is\(\.broad, \.half\)", style)[0]) * 16
    )
    least = {PAGE: narrow - 2 * 19.2 - 34, HALF: 25 * 16 - 34, PHONE: PHONE_PIXELS}  # of a panel of at least 25rem
    for frame, pixels in least.items():
        assert frame.font * min(1.0, pixels / frame.width) >= 11, frame
    assert PANEL.font * PHONE_PIXELS / PANEL.width >= 11
    assert ".plot.narrow { display: none;" in style and ".plot.narrow { display: block; }" in style


def test_a_search_shows_error_bars_names_and_a_verdict() -> None:
    rows = candidates()
    for frame in (PAGE, PHONE):
        svg = parse(charts.front(rows, 0.02, "requests a second", CONFIRMED, frame))
        bars = [line for line in svg.iter("line") if line.get("class") == "bar"]
        assert len(bars) == len(rows) + 1, "the winner's other questions have one, too"
        strong = [bar for bar in bars if bar.get("stroke") != "#8a8a8a"]  # the others may end at the chart's edge
        lengths = sorted(float(bar.get("y2", "")) - float(bar.get("y1", "")) for bar in strong)
        shown_rows = [row for row in rows if row["winner"] or row["front"]]
        widths = sorted(row["high"] - row["low"] for row in [*shown_rows, CONFIRMED])
        assert [length / lengths[-1] for length in lengths] == pytest.approx([w / widths[-1] for w in widths], rel=0.01)
        output = {text for text, _ in texts(svg)}
        assert {row["name"] for row in rows if row["winner"] or row["front"]} | {"on 1,500 other questions"} <= output
        assert len(svg.findall(".//circle[@class='ring']")) == 1


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
    rows = Rows(html.report_page(Findings(make_results())), hidden).rows
    for family in ("chart", "count"):
        (row,) = (row for row in rows if row.startswith(f" {family} "))
        assert re.search(r"\b90\b", row) and "−5.1 to +5.1" in row and re.search(r"(?<![\d.+−])0\.0\b", row), row
    (speed, *_) = (row for row in rows if row.startswith(" requests/s "))
    assert hidden == "stacked" or "in the repeats" in speed

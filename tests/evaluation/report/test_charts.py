"""Charts: what is drawn where, read back from the markup."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.made_results import HOSTILE, comparison, layer_errors, make_bench
from vlmcompress.evaluation.report import heatmap, panels, scatter
from vlmcompress.evaluation.report.findings import Row
from vlmcompress.evaluation.report.svg import element, linear, logarithmic


def parse(markup: object) -> ElementTree.Element:
    return ElementTree.fromstring(str(markup))


def across(mark: ElementTree.Element, name: str) -> float:
    return float(mark.get(name, "").removesuffix("%"))


def points(line: ElementTree.Element) -> np.ndarray:
    return np.array([[float(x) for x in pair.split(",")] for pair in line.get("points", "").split()])


def test_element_escapes_text_and_attributes() -> None:
    made = parse(element("text", HOSTILE.translate({0: None, 27: None}), title='"<&', x=0.125, y=None, class_="a"))
    assert made.attrib == {"title": '"<&', "x": "0.12", "class": "a"} and "<script>" in (made.text or "")


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
    svg = parse(panels.accuracy(Row("all", broken, True), axis))
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
    axis = panels.accuracy_axis([Row("all", comparison("awq"), True), Row("x", comparison("broken", low=-0.9), False)])
    assert axis.low == pytest.approx(-0.3, abs=0.11)


def test_a_row_that_is_not_judged_has_no_verdict_and_no_margin() -> None:
    broken = comparison("broken")
    axis = linear(-0.1, 0.1)
    svg = parse(panels.accuracy(Row("chart", broken, False), axis))
    group = svg.find("g")
    assert group is not None and group.get("class") == "even" and svg.find("rect") is None
    assert (svg.findtext("title") or "").endswith("p = 0.000137")
    wide = broken.model_copy(update={"margin": 0.3})  # beyond the axis: nothing of the chart is
    assert parse(panels.accuracy(Row("chart", wide, True), axis)).find("rect") is None


def test_cumulative_curve_is_the_empirical_distribution() -> None:
    rng = np.random.default_rng(0)
    sides = {
        "baseline": [rng.lognormal(6, 0.4, 50), rng.lognormal(6, 0.4, 50)],
        "candidate": [rng.lognormal(5.5, 0.4, 90)],
    }
    svg = parse(panels.cumulative("first token", "ms", sides))
    lines = {line.get("class"): points(line) for line in svg.findall("polyline")}
    assert sum(line.get("class") == "baseline repeat" for line in svg.findall("polyline")) == 2
    assert "candidate repeat" not in lines
    everything = np.concatenate([v for lists in sides.values() for v in lists])
    axis = logarithmic(everything.min(), everything.max())
    pooled = np.sort(np.concatenate(sides["baseline"]))
    top, bottom = lines["baseline curve"][:, 1].min(), lines["baseline curve"][:, 1].max()
    for x, y in lines["baseline curve"][1::10]:
        value = np.exp(np.log(axis.low) + (x - 44) / 260 * np.log(axis.high / axis.low))
        assert np.mean(pooled <= value) == pytest.approx((bottom - y) / (bottom - top), abs=0.02)
    assert {text.text for text in svg.findall("text[@class]")} == {
        f"{np.median(np.concatenate(lists)):.0f} ms" for lists in sides.values()
    }


def test_cumulative_curve_of_nothing_positive_is_no_chart() -> None:
    assert panels.cumulative("divergence", "nats", {"candidate": [[0.0, 0.0]]}) == ""


def test_histogram_counts_everything() -> None:
    values = [80, 80, 81, 85, 90, 90, 90]
    svg = parse(panels.histogram("prompt tokens", "tokens", {"baseline": values, "candidate": values}))
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


def test_cells_have_their_numbers_where_they_fit() -> None:
    """In percent, and as a tooltip in full everywhere."""
    few, many = (heatmap.grids(layer_errors(blocks))[0] for blocks in (4, 80))
    scale = heatmap.extremes([few, many])
    svg = parse(heatmap.heatmap(few, scale))
    numbers = [text.text for text in svg.findall("text[@class='number']")]
    assert numbers == [heatmap.compact(100 * error) for row in few.cells.values() for error in row.values()]
    crowded = parse(heatmap.heatmap(many, scale))
    assert crowded.findall("text[@class='number']") == [] and len(crowded.findall("rect/title")) == 4 * 80


def test_legends_are_in_equal_factors() -> None:
    errors = heatmap.legend((0.0001, 0.01))
    assert [swatch.text for swatch in errors] == ["0.0100%", "0.0316%", "0.100%", "0.316%", "1.00%"]
    assert np.allclose([swatch.shade for swatch in errors], np.linspace(0.06, 1, 5))
    assert [swatch.text for swatch in heatmap.legend((0.01, 0.01))] == ["1.00%"]
    changes = heatmap.change_legend(4.0)
    assert [s.text for s in changes] == ["0.25x", "0.50x", "unchanged", "2.00x", "4.00x"]
    assert [s.kind for s in changes] == ["gain", "gain", "", "loss", "loss"]
    assert [s.text for s in heatmap.change_legend(1.0)] == ["unchanged"]


def test_heatmap_has_a_cell_a_layer_and_the_worst_expert() -> None:
    errors = layer_errors() | {f"model.layers.0.mlp.experts.{i}.up": {"text": 0.001 * i} for i in range(1, 9)}
    grids = heatmap.grids(errors)
    assert [(g.part, g.modality, g.blocks) for g in grids] == [
        ("language_model", "text", 4),
        ("language_model", "vision", 4),
        ("model.layers", "text", 1),
    ]
    assert grids[2].cells == {"mlp.experts.*.up": {0: 0.008}}
    scale = heatmap.extremes(grids)
    cells = parse(heatmap.heatmap(grids[1], scale)).findall("rect")
    shades = [float(cell.get("fill-opacity", "")) for cell in cells]
    flat = [error for row in grids[1].cells.values() for error in row.values()]
    assert len(cells) == 16 and np.all(np.diff(np.array(shades)[np.argsort(flat)]) >= 0)
    assert heatmap.strength(scale[0], scale) == pytest.approx(0.06) and heatmap.strength(scale[1], scale) == 1.0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(-5, 5)), min_size=1, max_size=8))
def test_front_is_what_nothing_beats(pairs: list[tuple[int, int]]) -> None:
    runs = [scatter.Point(str(i), gain, comparison("awq", difference=d / 100)) for i, (gain, d) in enumerate(pairs)]
    best = {(gain, d) for gain, d in pairs if not any(g >= gain and e >= d and (g, e) != (gain, d) for g, e in pairs)}
    front = [(p.gain, round(100 * p.accuracy.difference)) for p in scatter.undominated(runs)]
    assert set(front) == best and front == sorted(front)


def test_a_side_without_a_good_request_has_no_dot() -> None:
    dead = make_bench().summary["serve"]["cold"]["request_throughput"].model_copy(update={"ratio": 0.0, "low": 0.0})
    svg = parse(panels.gain("request_throughput", dead, panels.gain_axis([dead])))
    assert svg.find(".//circle") is None and "not comparable" in (svg.findtext("title") or "")


def test_gain_axis_has_the_baseline_and_all_repeats() -> None:
    rows = [r for states in make_bench(1.9).summary.values() for metrics in states.values() for r in metrics.values()]
    axis = panels.gain_axis(rows)
    assert axis.low < 1 < axis.high and any(tick == pytest.approx(1) for tick in axis.ticks)
    assert axis.high >= max(1 / r.low if not r.higher_is_better else r.high for r in rows)

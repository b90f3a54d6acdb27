"""Plots: marks stand where their values are, and no value stretches an axis until the others can't be told apart."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.made_results import HOSTILE, comparison
from vlmcompress.evaluation.report import plots, search
from vlmcompress.evaluation.report.plots import linear
from vlmcompress.utils.text import points


@given(st.floats(-0.9, 0.9), st.floats(0.001, 1.8))
def test_an_axis_holds_its_range_in_few_round_steps(low: float, width: float) -> None:
    axis = linear(low, low + width, points)
    assert axis.ticks[0] <= low + 1e-6 and axis.ticks[-1] >= low + width - 1e-6 and 2 <= len(axis.ticks) <= 7
    assert axis.at(axis.ticks[0]) == 0 and axis.at(axis.ticks[-1]) == 100


def test_an_interval_is_to_scale() -> None:
    broken = comparison("broken")
    axis = linear(-0.1, 0.1, points)
    markup = plots.accuracy(broken, axis, judged=True).markup
    left, width = map(float, re.search(r'range" style="left:([\d.]+)%;width:([\d.]+)%', markup).groups())
    middle = float(re.search(r'dot" style="left:([\d.]+)%', markup)[1])
    share = (broken.difference - broken.low) / (broken.high - broken.low)
    assert (middle - left) / width == pytest.approx(share, abs=1e-3) and width == pytest.approx(
        50 * 10 * (broken.high - broken.low), abs=0.1
    )
    assert float(re.search(r'lost" style="width:([\d.]+)%', markup)[1]) == axis.at(-broken.margin)
    assert 'class="row fail"' in markup and "\N{MINUS SIGN}4.2 points" in markup
    unjudged = plots.accuracy(broken, axis, judged=False).markup
    assert 'class="row even"' in unjudged and "lost" not in unjudged


def test_one_wild_value_does_not_stretch_an_axis() -> None:
    wild = plots.points_axis([comparison("awq"), comparison("broken", low=-0.9)])
    assert wild.ticks[0] == pytest.approx(-0.3, abs=0.11)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(-5, 5)), min_size=1, max_size=8))
def test_the_front_is_pareto_optimal(pairs: list[tuple[int, int]]) -> None:
    best = {(gain, d) for gain, d in pairs if not any(g >= gain and e >= d and (g, e) != (gain, d) for g, e in pairs)}
    assert plots.undominated(pairs) == best


def candidates() -> list[dict]:
    """Candidates of a search, one of them with a hostile name and a wide interval."""
    values = [("w4", 1.9, -0.004), (HOSTILE, 2.4, -0.05), ("int8", 1.4, 0.001)]
    shared = {"questions": 300, "winner": False, "rough": False, "chance": 0.5, "divergence": 0.01}
    rows = [
        {
            "name": name,
            "gain": gain,
            "difference": d,
            "believed": d,
            "low": d - 0.4,
            "high": d + 0.01,
            "why": "",
            **shared,
        }
        for name, gain, d in values
    ]
    rows[0]["winner"] = True
    return rows


def test_a_search_shows_its_candidates_and_its_verdict() -> None:
    request = {"model": "demo-llava", "target": "cpu", "max_drop": 0.02, "optimize": "memory", "gains": "modelled"}
    rest = {"questions": {"search": 900, "asked": 900, "full_grid": 9000}, "seconds": 60.0, "left_out": {"a": "b"}}
    data = {
        **request,
        **rest,
        "ended_by_budget": False,
        "nearest": None,
        "candidates": candidates(),
        "winner": {"name": "x"},
    }
    confirmed = {"verdict": "inconclusive", "questions": 1500, "difference": -0.006, "low": -0.025, "high": 0.01}
    text = search.page({**data, "confirmed": {**confirmed, "images": 500, "missing": 70, "unit": "images"}})
    assert 'class="pill inconclusive"' in text and 'class="verdict inconclusive"' in text and "<script" not in text
    assert "on 1,500 other questions about 500 images" in text and "about 70 more images would decide" in text
    discs = re.findall(r'<i class="disc (\w+)( front)?( strong)?"[^>]*>(.)</i>', text)
    assert [(*classes, number) for *classes, number in discs][::-1] == [
        *[("mark", " front", " strong", "1"), ("mark", " front", "", "2"), ("mark", " front", "", "3")],
        ("inconclusive", "", "", "?"),
    ]
    assert "pill" not in search.page(data).partition("<main>")[2]

"""Numbers and sentences, letter by letter."""

from __future__ import annotations

import math

import pytest

from tests.report.conftest import comparison, make_bench, make_results, make_suite
from vlmcompress.report import findings, words
from vlmcompress.results import Ratio


def ratio(middle: float, low: float, high: float, higher_is_better: bool = True) -> Ratio:
    return Ratio(
        baseline=1, candidate=middle, ratio=middle, low=low, high=high, higher_is_better=higher_is_better, unit=""
    )


def test_points_have_no_negative_zero() -> None:
    assert [words.points(x) for x in (-0.013, 0.013, -0.0001, 0.0)] == ["-1.3", "+1.3", "0.0", "0.0"]


def test_figures_have_three_digits() -> None:
    values = [0, 0.0123, 0.1, 1, 9.999, 12, 435.4, 999.6, 1234.5, 1.23e-5, 1e-3]
    expected = ["0", "0.0123", "0.100", "1.00", "10.0", "12.0", "435", "1,000", "1,234", "1.2e-5", "0.00100"]
    assert [words.figures(value) for value in values] == expected


def test_sizes() -> None:
    values = [0, 999, 1000, 4_100_000, 999_600_000, 5e15]
    assert [words.size(value) for value in values] == ["0 B", "999 B", "1.00 kB", "4.10 MB", "1.00 GB", "5,000 TB"]


def test_typeset_touches_numbers_only() -> None:
    assert words.typeset("a-b -1.0 to (-2.5), 1.4x faster, W4x-3") == "a-b −1.0 to (−2.5), 1.4× faster, W4×-3"


@pytest.mark.parametrize(
    "found, pace, spread",
    [
        (ratio(1.4, 1.3, 1.5), "1.40x faster", "1.30x to 1.50x"),
        (ratio(0.8, 0.75, 0.9), "1.25x slower", "1.11x to 1.33x"),
        (ratio(0.5, 0.4, 0.625, higher_is_better=False), "2.00x faster", "1.60x to 2.50x"),
        (ratio(1.1, 0.9, 1.2), "no clear change", "0.90x to 1.20x"),
        (ratio(0.0, 0.0, 0.0), "not comparable", ""),
        (ratio(math.inf, 1.0, math.inf), "not comparable", ""),
    ],
)
def test_pace(found: Ratio, pace: str, spread: str) -> None:
    assert (words.pace(found), words.spread(found)) == (pace, spread)


@pytest.mark.parametrize(
    "name, known",
    [
        ("ttft_p50_ms", "TTFT median, ms"),
        ("e2e_p99_ms", "E2E p99, ms"),
        ("request_throughput", "requests/s"),
        ("cache_misses", "cache misses"),
    ],
)
def test_metric(name: str, known: str) -> None:
    assert words.metric(name) == known


@pytest.mark.parametrize(
    "known, sentence",
    [
        ("awq", "No accuracy was lost: -0.2 points, 95% interval -0.9 to +0.3, margin 1.0."),
        ("fp8", "Accuracy rose: +0.4 points (95% interval 0.0 to +1.1)."),
        ("broken", "Accuracy was lost: -4.2 points (95% interval -6.9 to -2.3); the margin is 1.0."),
        (
            "small",
            "Can't tell: -0.2 points, and the 95% interval -1.6 to +0.9 reaches past the margin of 1.0. "
            "About 1,045 samples would decide it, 400 were asked.",
        ),
    ],
)
def test_verdict(known: str, sentence: str) -> None:
    assert findings.verdict(comparison(known)) == sentence


def test_verdict_of_a_small_but_certain_loss() -> None:
    lost = comparison("awq", low=-0.0088, high=-0.0001)
    assert findings.verdict(lost).startswith("Accuracy fell a little, within the margin of 1.0: -0.2 points")


def test_verdict_when_nothing_would_decide() -> None:
    assert "show a drop of 0.6 points four times in five" in findings.verdict(comparison("small", needed=None))


def test_headline_of_one_suite_and_of_several() -> None:
    assert findings.headline(make_results())[:2] == [
        "Gate default: pass (2 pass).",
        "No accuracy was lost: -0.2 points, 95% interval -0.9 to +0.3, margin 1.0.",
    ]
    several = make_results(gate=None, suites=[make_suite("a", "fp8"), make_suite("b", "broken")])
    assert findings.headline(several)[0] == "Accuracy: fail (1 fail, 1 pass)."
    assert findings.headline(several)[1].startswith("a: Accuracy rose")


def test_main_speed_prefers_cold_requests_and_skips_what_cannot_be_compared() -> None:
    bench = make_bench()
    assert findings.main_speed(bench) == (
        "requests/s served cold",
        bench.summary["serve"]["cold"]["request_throughput"],
    )
    dead = {**bench.summary["serve"]["cold"], "request_throughput": ratio(0.0, 0.0, 0.0)}
    found = findings.main_speed(bench.model_copy(update={"summary": {"serve": {"cold": dead}}}))
    assert found is not None and found[0] == "TTFT median served cold"
    assert findings.main_speed(bench.model_copy(update={"summary": {}})) is None


def test_work_is_counted_apart_by_state_and_side() -> None:
    bench = make_bench()
    runs = [
        run.model_copy(update={"cached_tokens": 7, "failed": 1}) if run.state == "warm" else run for run in bench.runs
    ]
    rows = {what: sides for what, *sides in findings.work(bench.model_copy(update={"runs": runs}))}
    assert (
        rows["visual tokens a request, cold"] == ["64.0", "64.0"] and rows["text tokens a request, cold"][0] == "24.0"
    )
    assert rows["prompt tokens from the prefix cache, cold"] == ["0", "0"]
    assert rows["prompt tokens from the prefix cache, warm"] == ["21", "21"] and rows["failed requests, warm"] == [
        "3",
        "3",
    ]

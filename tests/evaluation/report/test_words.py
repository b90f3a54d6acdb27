"""What sentences and tables say beyond the snapshot: ratios that may be chance, rarer verdicts, what rules judge."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.kit.made_results import comparison, make_bench, make_results, make_suite
from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.report.findings import Findings, rows
from vlmcompress.evaluation.report.sections import provenance_rows, work_rows
from vlmcompress.evaluation.results import Calibration, Gate, GateRule, Provenance, Ratio, Side, Suite


def ratio(middle: float, low: float, high: float, higher_is_better: bool = True, **changes: Any) -> Ratio:
    ends = {"low": low, "high": high, "interval": (low, high)}
    values = {"baseline": 1, "candidate": middle, "ratio": middle, **ends, **changes}
    return Ratio(**values, higher_is_better=higher_is_better, unit="")


@pytest.mark.parametrize(
    "change, pace, spread",
    [
        (ratio(1.4, 1.3, 1.5), "1.40x faster", "1.30x to 1.50x"),
        (ratio(0.8, 0.75, 0.9), "1.25x slower", "1.11x to 1.33x"),
        (ratio(0.5, 0.4, 0.625, higher_is_better=False), "2.00x faster", "1.60x to 2.50x"),
        (ratio(1.1, 0.9, 1.2), "can't tell (1.10x)", "0.90x to 1.20x"),
        (ratio(1.4, 1.3, 1.5, interval=(0.9, 1.9)), "can't tell (1.40x)", "1.30x to 1.50x"),
        (ratio(3.02, 3.02, 3.02, interval=None), "can't tell (3.02x)", ""),
        (ratio(3.02, 3.02, 3.02, higher_is_better=False, interval=None), "can't tell (0.33x)", ""),
        (ratio(0.0, 0.0, 0.0), "not comparable", ""),
        (ratio(math.inf, 1.0, math.inf), "not comparable", ""),
    ],
)
def test_speed_in_words(change: Ratio, pace: str, spread: str) -> None:
    assert (words.pace(change), words.spread(change)) == (pace, spread)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (
            {
                "margin": 0.05,
                "baseline_only": 4,
                "candidate_only": 0,
                "low": -0.021,
                "high": 0.001,
                "difference": -0.009,
            },
            "A loss of 5 points or more is ruled out: -0.9 points (95% interval -2.1 to +0.1); 4 answers lost, none won.",
        ),
        (
            {"margin": 0.005, "verdict": "inconclusive", "baseline_only": 1, "needed": 5000, "clusters": 900},
            "Can't tell if 0.5 points or more were lost: -0.2 points (95% interval -0.9 to +0.3); 1 answer lost, 1 won. "
            "About 4,100 more samples would decide it; 900 were asked.",
        ),
        (
            {"low": -0.0088, "high": -0.0001},
            "Some accuracy was lost, but a loss of 1 point or more is ruled out: -0.2 points (95% interval -0.9 to 0.0); "
            "3 answers lost, 1 won.",
        ),
        (
            {"both": None, "baseline_only": None, "candidate_only": None, "neither": None},
            "A loss of 1 point or more is ruled out: -0.2 points (95% interval -0.9 to +0.3).",
        ),
    ],
)
def test_the_verdict_states_what_was_shown(changes: dict[str, Any], sentence: str) -> None:
    """A loss that was seen is never called none: the sentence has what the interval rules out, and answers lost and won."""
    assert words.verdict_text(comparison("awq", **changes)) == sentence


@pytest.mark.parametrize(("low", "suspicious"), [(0.0099, False), (0.0101, True)])
def test_a_gain_beyond_the_margin_is_suspicious(low: float, suspicious: bool) -> None:
    """Beside the verdict, which it does not change: the candidate can't be worse, but the baseline may be broken."""
    better = comparison("fp8", low=low, high=0.05, difference=0.03)
    (line, *_) = Findings(make_results(suites=[make_suite(overall=better)], gate=None)).headline
    assert line.startswith("Accuracy rose: +3.0 points")
    assert ("Suspiciously better: a gain of more than 1 point is shown" in line) is suspicious


def test_verdict_when_nothing_would_decide() -> None:
    assert "show a drop of 0.6 points four times in five" in words.verdict_text(comparison("small", needed=None))


def test_main_speed_prefers_cold_requests_and_skips_what_cannot_be_compared() -> None:
    bench = make_bench()
    assert Findings(make_results(bench=bench)).main_speed == (
        "requests/s served cold",
        bench.summary["serve"]["cold"]["request_throughput"],
    )
    dead = {**bench.summary["serve"]["cold"], "request_throughput": ratio(0.0, 0.0, 0.0)}
    without = bench.model_copy(update={"summary": {"serve": {"cold": dead}}})
    main = Findings(make_results(bench=without)).main_speed
    assert main is not None and main[0] == "TTFT median served cold"
    assert Findings(make_results(bench=bench.model_copy(update={"summary": {}}))).main_speed is None


def test_work_is_counted_apart_by_state_and_side() -> None:
    bench = make_bench()
    runs = [
        run.model_copy(update={"cached_tokens": 7, "failed": 1}) if run.state == "warm" else run for run in bench.runs
    ]
    rows = {what: sides for what, *sides in work_rows(bench.model_copy(update={"runs": runs}))}
    assert (
        rows["visual tokens a request, cold"] == ["64.0", "64.0"] and rows["text tokens a request, cold"][0] == "24.0"
    )
    assert "prompt tokens from the prefix cache, cold" not in rows
    assert rows["prompt tokens from the prefix cache, warm"] == ["21", "21"] and rows["failed requests, warm"] == [
        "3",
        "3",
    ]


def rule(family: str | None, verdict: str, margin: float) -> GateRule:
    name, limit = f"world: {family or 'accuracy'}", f"-{100 * margin:.1f} points"
    return GateRule(name=name, verdict=verdict, value="", limit=limit, suite="world", family=family, margin=margin)


def fallen(suite: Suite, gate: Gate | None) -> list[str]:
    return Findings(make_results(suites=[suite], gate=gate)).suites[0].fallen


def test_a_row_has_the_verdict_of_the_rule_that_judges_it() -> None:
    """All samples first. Families that no rule judges have no verdict, with a gate and without one."""
    lost = comparison("family", verdict="fail")
    suite = make_suite(families={"chart": comparison("family"), "count": lost})
    alone = rows(suite, None)
    assert [(row.name, row.judged) for row in alone] == [("all", True), ("chart", False), ("count", False)]
    assert fallen(suite, None) == ["More than 1 point lost, shown after correction for 2 families: count."]
    wide = Gate(name="g", verdict="pass", rules=[rule(None, "pass", 0.05), rule("count", "pass", 0.3)])
    verdicts = {
        row.name: (row.comparison.verdict, row.comparison.margin) if row.judged else None for row in rows(suite, wide)
    }
    assert verdicts == {"all": ("pass", 0.05), "chart": None, "count": ("pass", 0.3)}
    assert fallen(suite, wide) == []
    other = wide.model_copy(update={"rules": [r.model_copy(update={"suite": "other"}) for r in wide.rules]})
    assert rows(suite, other) == alone


MADE = Provenance(
    source="demo",
    family="llava",
    scheme="gptq",
    options={"bits": 4, "symmetric": True, "clip": None},
    formats=["weights INT4 group 128, activations 16 bit"],
    vision="bf16",
    reducer="dart:0.5",
    calibration=Calibration(
        source="c.parquet", samples=1200, images=1100, tokens={"text": 9, "vision": 90}, prefix="quantized"
    ),
    seed=3,
    warnings=["something was damped"],
    versions={"vlmcompress": "0.1.0"},
)


def test_how_it_was_made() -> None:
    rows = dict(provenance_rows(Side(name="c", path="c", reducer="dart:0.5", made=MADE)))
    assert rows == {
        "original": "demo",
        "family": "llava",
        "scheme": "gptq",
        "options": "bits 4, symmetric yes",
        "stored as": "weights INT4 group 128, activations 16 bit",
        "vision tower": "bf16",
        "visual-token reducer": "dart:0.5",
        "calibration data": "source c.parquet, samples 1200, images 1100, tokens text 9, vision 90, prefix quantized",
        "seed": "3",
        "made with": "vlmcompress 0.1.0",
        "warnings": "something was damped",
    }
    bare = dict(provenance_rows(Side(name="c", path="c", made=Provenance(scheme="rtn"))))
    assert bare["calibration data"].startswith("none") and "visual-token reducer" not in bare
    assert provenance_rows(Side(name="c", path="c")) == []
    ((_, attached),) = provenance_rows(Side(name="c with x", path="c", reducer="dart:0.5"))
    assert attached == "dart:0.5, attached for this run; the checkpoint does not carry it"

"""From outcomes to figures, ratios and memory; worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vlmcompress.evaluation.results import LoadRun
from vlmcompress.evaluation.speed.client import Outcome
from vlmcompress.evaluation.speed.counters import Counters, parse_metrics
from vlmcompress.evaluation.speed.measure import (
    burst_record,
    figures,
    interval,
    ratio,
    requests_at_once,
    summarise,
)

SEEN = Counters(drafts=4, drafted=12, accepted=6, accepted_at=(3, 2, 1))


def outcome(ttft: float, gaps: list[float], error: str = "") -> Outcome:
    tokens = len(gaps) + 1
    return Outcome(ttft, ttft + sum(gaps), gaps, 94, 81, 0 if error else tokens, error)


def test_serve_run() -> None:
    outcomes = [outcome(0.1, [0.01, 0.03]), outcome(0.3, [0.02, 0.02]), outcome(0.0, [], "HTTP 500")]
    run = burst_record(outcomes, 2.0, side="candidate", repeat=1, slo={"ttft": 200, "tpot": 25}, counters=SEEN)
    assert (run.completed, run.failed) == (2, 1)
    assert (run.text_tokens, run.visual_tokens, run.output_tokens) == (2 * 13, 2 * 81, 6)
    assert (run.drafts, run.drafted, run.accepted, run.accepted_at) == (4, 12, 6, [3, 2, 1])
    assert run.goodput == 0.5  # one request in two seconds
    assert run.ttft_ms == [100, 300]
    assert run.tpot_ms == [20, 20]
    assert run.itl_ms == [10, 30, 20, 20]
    by_name = figures(run)
    assert (by_name["request_throughput"], by_name["output_throughput"]) == (1, 3)
    assert (by_name["ttft_p50_ms"], by_name["ttft_p90_ms"]) == (200, pytest.approx(280))
    assert burst_record(outcomes, 2.0, side="candidate", repeat=1, slo={}, counters=SEEN).goodput is None


def run(side: str, repeat: int, seconds: float, state: str = "cold") -> LoadRun:
    return LoadRun(
        side=side,  # type: ignore[arg-type]
        mode="serve",
        state=state,  # type: ignore[arg-type]
        repeat=repeat,
        duration=seconds,
        completed=10,
        failed=0,
        text_tokens=1,
        visual_tokens=1,
        output_tokens=20,
        ttft_ms=[100 * seconds],
    )


def test_ratios_are_of_neighbours() -> None:
    """The machine slows down from repeat to repeat; the ratio of each pair stays 2."""
    runs = [
        run(side, r, (1 + r) * (2 if side == "baseline" else 1)) for side in ("baseline", "candidate") for r in range(3)
    ]
    summary = summarise([*runs, run("baseline", 0, 4, "warm"), run("candidate", 0, 1, "warm")])["serve"]
    speed = summary["cold"]["request_throughput"]
    assert (speed.gain, speed.low, speed.high) == (2, 2, 2)
    assert (speed.baseline, speed.candidate) == (2.5, 5)
    assert speed.higher_is_better and speed.unit == "requests/s"
    first = summary["cold"]["ttft_p50_ms"]
    assert (first.gain, first.higher_is_better, first.unit) == (2, False, "ms")
    assert summary["warm"]["request_throughput"].gain == 4
    assert "itl_p50_ms" not in summary["cold"]


def test_no_ratio_to_nothing() -> None:
    assert ratio("goodput", [({"goodput": 0.0}, {"goodput": 1.0})]) is None
    goodput = ratio("goodput", [({"goodput": 2.0}, {"goodput": 0.0}), ({"goodput": 2.0}, {"goodput": 1.0})])
    assert goodput is not None and (goodput.gain, goodput.low, goodput.high) == (0.25, 0, 0.5)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 11, 40])
def test_interval_holds_the_ratio_as_often_as_it_says(n: int) -> None:
    """Oracle: simulated repeats of two equal sides; 95% of the intervals hold 1, and one repeat has none."""
    draws = np.random.default_rng(n).lognormal(0.0, 0.1, (4_000, n))
    intervals = [interval(row) for row in draws.tolist()]
    held = sum(1 for ends in intervals if ends and ends[0] <= 1 <= ends[1])
    assert 0.938 < held / len(intervals) < 0.962, "four standard errors of 4,000 draws"
    assert interval([3.02]) is None and interval([0.0, 1.0]) is None


def test_requests_at_once() -> None:
    """In whole blocks: 126.5 tokens take one of 128, 128.5 take two."""
    cache = {"block_size": "128", "kv_cache_size_tokens": "524288"}
    assert (requests_at_once(126.5, cache), requests_at_once(128.5, cache)) == (4096, 2048)


def test_metrics_are_read_from_the_exposition_format() -> None:
    text = '# HELP a b\n# TYPE a counter\na_total{engine="0",path="C:\\\\x \\"y\\""} 3.0\nplain 1e+09\n\n'
    assert parse_metrics(text) == [
        ("a_total", {"engine": "0", "path": 'C:\\\\x \\"y\\"'}, "3.0"),
        ("plain", {}, "1e+09"),
    ]

"""What the verb refuses before it starts an engine, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.sections import drafting as drafting_table
from vlmcompress.evaluation.report.text import markdown, tables
from vlmcompress.evaluation.results import Bench, LoadRun, Memory, Results, Side
from vlmcompress.evaluation.speed.measure import summarise
from vlmcompress.evaluation.speed.runs import run
from vlmcompress.utils.errors import UserError

MODEL = "eval/demo/demo-llava"
SIZES = {"baseline": 9_000_000, "candidate": 4_100_000}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "--requests 0: must be from 1 to 1,000,000"),
        ({"repeats": int("9" * 40)}, "--repeats 9{40}: must be from 1 to 1,000"),
        ({"load": "burst:3"}, "no load 'burst'"),
        ({"data": "/nowhere/images"}, "/nowhere/images does not exist"),
        ({"baseline": "eval/demo"}, "eval/demo: not a checkpoint"),
        ({"speculative": {"candidate": "ngram"}}, "--speculative-config ngram is no JSON object"),
    ],
)
def test_bad_options_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(**{"candidate": MODEL, "baseline": MODEL} | changes)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no image"):
        run(MODEL, MODEL, data=tmp_path)


def test_the_text_has_both_states_of_earlier_results() -> None:
    output = tables(findings(make_bench()))
    assert "8 clients at once, 10 requests a burst, 5 output tokens each" in output and "photos" in output
    assert "Served, cold (no caches)" in output and "Served, warm (caches on)" in output
    row = next(line for line in output.splitlines() if "requests/s" in line)
    assert row.split() == ["requests/s", "5.00", "10.0", "can't", "tell", "(2.00x)"]
    assert "weights" in output and "4.10 MB" in output
    assert [line.split()[-1] for line in output.splitlines() if "failed requests" in line] == ["2"]


def findings(bench: Bench) -> Findings:
    before, after = (Side(name=side, path=side, weight_bytes=size) for side, size in SIZES.items())
    return Findings(Results(created="", version="", baseline=before, candidate=after, bench=bench))


def make_bench() -> Bench:
    """A candidate twice as fast; two requests of it failed."""
    runs = [
        LoadRun(
            side=side,
            mode="serve",
            state=state,
            repeat=0,
            duration=2.0 if side == "baseline" else 1.0,
            completed=10,
            failed=2 if (side, state) == ("candidate", "warm") else 0,
            text_tokens=100,
            visual_tokens=810,
            output_tokens=50,
            ttft_ms=[20.0, 30.0],
        )
        for side in ("baseline", "candidate")
        for state in ("cold", "warm")
    ]
    return Bench(
        load="closed:8",
        requests=10,
        out_tokens=5,
        source="photos",
        sizes=[],
        repeats=2,
        order=["baseline", "candidate"],
        tool="test",
        runs=runs,
        summary=summarise(runs),
        memory={side: Memory(weight_bytes=n, kv_cache_tokens=9600, max_concurrency=100) for side, n in SIZES.items()},
    )


def test_drafted_tokens_are_shown_for_each_side() -> None:
    """Twelve tokens drafted in four steps, six accepted: half of them, and 1 + 6 / 4 tokens a step.

    Of 80 tokens after the first ones 6 were drafted, so 74 steps took 80 * 37 ms, where the baseline's took 20 ms each;
    what a client saw, to whom they came together, is not asked.
    """
    bench = make_bench()
    assert "drafted" not in tables(findings(bench))
    counts = {"drafts": 2, "drafted": 6, "accepted": 3, "accepted_at": [2, 1, 0]}
    drafting = [
        run.model_copy(update=counts) for run in bench.runs if (run.side, run.state) == ("candidate", "cold")
    ] * 2
    changed = [run for run in bench.runs if (run.side, run.state) != ("candidate", "cold")] + drafting
    seconds = {"baseline": 40 * 0.02, "candidate": 40 * 0.037}
    changed = [run.model_copy(update={"decode_seconds": seconds[run.side], "tpot_ms": [0.01]}) for run in changed]
    report = findings(bench.model_copy(update={"runs": changed, "summary": summarise(changed)}))
    row = ("candidate, cold", "12", "6", "50.0%", "100%, 50%, 0%", "2.50", "2.00 of the baseline's")
    assert drafting_table(changed)[1:] == [row]
    assert all(cell in text for text in (tables(report), markdown(report).replace("\\", "")) for cell in row)

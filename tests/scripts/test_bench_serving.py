"""The serving benchmark: its checkpoints, its sums, and a small run of it in the real server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.kit.places import ROOT
from vlmcompress.evaluation.speed.client import Outcome
from vlmcompress.evaluation.speed.counters import Counters
from vlmcompress.reduction import block as reducer_block
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import bench_serving
import serving_burst
import serving_table
from serving_model import Variant, prepare

FULL, QUARTER, FLOOR = Variant("bf16"), Variant("bf16", "dart:1/4"), Variant("bf16", bench_serving.FLOOR)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


def test_a_reduced_checkpoint_has_the_weights_of_the_full_one(work: Path) -> None:
    reduced, full = prepare(QUARTER, work, 1), prepare(FULL, work, 1)
    assert (reduced / "model.safetensors").samefile(full / "model.safetensors")
    block = reducer_block.read_reducer(json.loads((reduced / "config.json").read_text()))
    assert block is not None and str(block.reducer) == "dart:0.25"
    assert reducer_block.read_reducer(json.loads((full / "config.json").read_text())) is None
    with safe_open(full / "model.safetensors", "pt") as weights:
        assert any(name.startswith("vision_tower.vision_model.") for name in weights.keys())  # noqa: SIM118


def test_every_group_starts_with_the_full_model() -> None:
    for variants in bench_serving.GROUPS.values():
        assert str(variants[0]) == serving_table.FULL
        assert len(set(variants)) == len(variants)
    kept = [serving_burst.visual_tokens(variant) for variant in bench_serving.GROUPS["cold"]]
    assert kept == [1024, 512, 256, 114, 1]


def test_four_full_requests_fit() -> None:
    assert (bench_serving.BLOCKS - 1) // -(-(1024 + 40 + 16) // bench_serving.BLOCK) == 4


def row(variant: str, turn: int, seconds: float, load: str = "latency", **extra) -> dict:
    return {"variant": variant, "load": load, "turn": turn, "clients": 1, "most_running": 1 + turn, "visual_tokens": 9,
            "request_throughput": 1 / seconds, "ttft_ms": [900 * seconds, 1000 * seconds, 1100 * seconds],
            "e2e_ms": [], "cached": 0.0, "fits": 8.0, **extra}  # fmt: skip


def group(rows: list[dict], **extra) -> dict:
    return {"cold": {"created": "", "version": "", "machine": {}, "layers": 1, "seconds": 1, "rows": rows, **extra}}


def test_ratios_are_those_of_a_turn() -> None:
    """A machine that gets three times as slow changes no ratio."""
    rows = [row(name, turn, share * slow, load, fits=4 / share)
            for load in ("latency", "load") for turn, slow in enumerate((1.0, 3.0, 1.0))
            for name, share in (("bf16 full", 1.0), ("bf16 dart:1/4", 0.25), ("bf16 uniform:1/1024", 0.1))]  # fmt: skip
    record = group(rows, reducer_ms={"dart:1/4": 5.0})
    summary = serving_table.summarise(record)
    quarter = summary["groups"]["cold"]["latency"]["bf16 dart:1/4"]
    assert (quarter["ttft_ratio"], quarter["throughput_ratio"], quarter["fits_ratio"]) == (0.25, 4, 4)
    assert (quarter["requests"], quarter["ttft_p50_ms"], quarter["most_running"]) == (9, 275, 3)
    assert quarter["ttft_p99_ms"] == pytest.approx(825, abs=10)
    assert summary["floor"] == 0.1
    assert summary["reducer"] == {"dart:1/4": {"ms": 5, "of_full": round(5 / 1100, 4), "of_own": round(5 / 275, 4)}}
    assert "| bf16 dart:1/4 | 9 | 0.28 s | 0.25 | 4.00 | 4.00 | 4.0 times |" in serving_table.render(record)


def test_a_mislabelled_run_is_refused() -> None:
    good = Outcome(prompt_tokens=290, visual_tokens=256, output_tokens=4)
    none, some = Counters(0, 0), Counters(32, 1)
    serving_burst.check("cold", QUARTER, [good], none, "latency")
    serving_burst.check("cold", QUARTER, [good], some.since(some), "latency")
    with pytest.raises(UserError, match="256 of 1024 visual tokens"):
        serving_burst.check("cold", FULL, [good], none, "latency")
    with pytest.raises(UserError, match="4 of 16 tokens"):
        serving_burst.check("cold", QUARTER, [good], none, "load")
    with pytest.raises(UserError, match="no such model"):
        serving_burst.check("cold", QUARTER, [good, Outcome(error="no such model")], none, "latency")
    with pytest.raises(UserError, match="a cold run took 32 tokens and 1 images"):
        serving_burst.check("cold", QUARTER, [good], some.since(none), "latency")
    again = Outcome(prompt_tokens=290, visual_tokens=256, output_tokens=16, cached_tokens=256)
    serving_burst.check("warm", QUARTER, [again], some.since(none), "again")
    with pytest.raises(UserError, match="found nothing in a cache"):
        serving_burst.check("warm", QUARTER, [again], some.since(some), "again")


def test_earlier_measurements_stay_when_a_later_turn_or_group_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run_group(group: str, folders: dict, turns: int, progress: ProgressBar) -> Iterator[list[dict]]:
        yield [row(name, 0, 1.0) for name in ("bf16 full", "bf16 dart:1/4", "bf16 uniform:1/1024")]
        if group == "cold":
            raise UserError("the server is gone")
        yield [row("bf16 full", 1, 1.0)]

    monkeypatch.setattr(bench_serving, "run_group", run_group)
    monkeypatch.setattr(bench_serving, "reducer_ms", lambda: {"dart:1/4": 5.0})
    out = tmp_path / "found.json"
    options = argparse.Namespace(out=out, turns=2, layers=1)
    folders = {v: tmp_path for variants in bench_serving.GROUPS.values() for v in variants}
    with pytest.raises(SystemExit, match="cold: the server is gone"):
        bench_serving.measure_groups(["cold", "warm"], folders, options)
    bench_serving.measure_groups(["quantized"], folders, options)
    results = json.loads(out.read_text())
    assert {name: len(record["rows"]) for name, record in results.items()} == {"cold": 3, "warm": 4, "quantized": 4}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["groups"].keys() == results.keys()


@pytest.mark.slow
@pytest.mark.engine
def test_groups_in_the_real_server(work: Path) -> None:
    """Three decoder layers; what each burst claims is checked as it runs."""
    variants = (FULL, QUARTER)
    folders = {variant: prepare(variant, work, 3) for variant in variants}
    (cold,) = bench_serving.run_group("cold", folders, 1, ProgressBar())
    (warm,) = bench_serving.run_group("warm", folders, 1, ProgressBar())
    assert [(r["variant"], r["load"]) for r in cold] == [(str(v), k) for k in ("latency", "load") for v in variants]
    assert [r["load"] for r in warm] == ["again", "again"]
    for full, quarter in (cold[2:], warm):
        assert quarter["fits"] > 2.5 * full["fits"] > 10
        assert quarter["request_throughput"] > 0
    assert cold[2]["most_running"] <= 4
    assert all(r["cached"] == 0 for r in cold) and all(0 < r["cached"] < 1 for r in warm)

"""Results as an evaluation and a benchmark of the demo model give them.

The comparisons' counts, limits and p-values are those of its recipes `awq` and `fp8` on 900 questions, and of a model with
18 of 400 answers lost; the rest is made to look like a run.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from random import Random
from statistics import median, quantiles
from typing import Any

from PIL import Image

from vlmcompress.evaluation.results import (
    Bench,
    Comparison,
    Divergence,
    Gate,
    GateRule,
    LoadRun,
    Memory,
    Provenance,
    Ratio,
    Results,
    Scored,
    Side,
    Suite,
)
from vlmcompress.evaluation.speed.measure import interval

HOSTILE = '</svg><script>alert(1)</script> | `rm` "quoted" & \x00\x1b'
# name -> right in both, lost, gained, wrong in both, limits, p, verdict at a margin of one point, samples needed
KNOWN: dict[str, tuple[int, int, int, int, float, float, float, str, int | None]] = {
    "awq": (864, 3, 1, 32, -0.008767, 0.003223, 0.625, "pass", None),
    "fp8": (867, 0, 4, 29, 0.000175, 0.011372, 0.125, "pass", None),
    "small": (383, 2, 1, 14, -0.015809, 0.009459, 1.0, "inconclusive", 1045),
    "broken": (367, 18, 1, 14, -0.069, -0.0231, 0.000137, "fail", None),
    "family": (86, 1, 1, 2, -0.05074, 0.05074, 1.0, "inconclusive", 4000),
}


def comparison(name: str, **changes: Any) -> Comparison:
    both, lost, gained, neither, low, high, p, verdict, needed = KNOWN[name]
    n = both + lost + gained + neither
    values: dict[str, Any] = {
        "n": n,
        "clusters": round(0.65 * n),
        "baseline": (both + lost) / n,
        "candidate": (both + gained) / n,
        "difference": (gained - lost) / n,
        "low": low,
        "high": high,
        "level": 0.95,
        "method": "gaffke",
        "p": p,
        "both": both,
        "baseline_only": lost,
        "candidate_only": gained,
        "neither": neither,
        "detectable": 0.0063,
        "margin": 0.01,
        "verdict": verdict,
        "needed": needed,
    }
    return Comparison(**(values | changes))


def make_suite(name: str = "world", outcome: str = "awq", **changes: Any) -> Suite:
    values: dict[str, Any] = {
        "name": name,
        "metric": "exact_match",
        "source": "test.parquet",
        "sha256": "ab" * 32,
        "samples": 900,
        "available": 900,
        "seed": 0,
        "max_tokens": 32,
        "overall": comparison(outcome),
        "families": {family: comparison("family", adjusted_p=1.0) for family in ("chart", "count", HOSTILE)},
        "agreement": 0.9956,
        "divergence": Divergence(n=900, mean=0.0078, median=0.00096, p95=0.0264, same_first=0.9925),
        "unparsed": (0, 2),
        "empty": (1, 2),
        "prompt_tokens": (81_000, 81_000),
        "scoring": "Equal but for case.",
    }
    return Suite(**(values | changes))


def make_samples(suite: str = "world", n: int = 60) -> list[Scored]:
    """Every 6th lost, every 10th worded differently, one gained."""
    rng = Random(3)
    samples = []
    for i in range(n):
        lost, gained, worded = i % 6 == 0, i == 7, i % 10 == 5
        right, wrong = f"red {i}", HOSTILE
        samples.append(
            Scored(
                id=f"q{i}",
                suite=suite,
                family=["chart", "count", HOSTILE][i % 3],
                question=f"what is {i} {HOSTILE}?",
                expected=right,
                baseline=wrong if gained else right,
                candidate=wrong if lost else right.title() if worded else right,
                baseline_score=float(not gained),
                candidate_score=float(not lost),
                candidate_parsed=not lost,
                baseline_tokens=80 + i % 17,
                candidate_tokens=80 + i % 17,
                image=f"image{i // 2}",
                kl=rng.lognormvariate(-7, 2) if i else 0.0,
            )
        )
    return samples


def make_bench(speed: float = 1.3) -> Bench:
    """Three repeats of both sides, served cold and warm; the candidate takes 1 / `speed` of the time."""
    rng = Random(4)
    runs = []
    for state, factor in (("cold", 1.0), ("warm", 0.6)):
        for repeat in range(3):
            for side in ("baseline", "candidate"):
                slow = factor * (1.0 if side == "baseline" else 1 / speed) * rng.uniform(0.97, 1.03)
                first = [slow * rng.lognormvariate(6.04, 0.35) for _ in range(40)]
                between = [slow * rng.lognormvariate(3.2, 0.25) for _ in range(400)]
                runs.append(
                    LoadRun(
                        side=side,
                        mode="serve",
                        state=state,
                        repeat=repeat,
                        duration=8 * slow,
                        completed=40,
                        failed=0,
                        text_tokens=960,
                        visual_tokens=2560,
                        output_tokens=440,
                        ttft_ms=first,
                        itl_ms=between,
                        e2e_ms=[f + 10 * 24 * slow for f in first],
                    )
                )
    figures: dict[str, Callable[[LoadRun], float]] = {
        "request_throughput": lambda run: run.completed / run.duration,
        "ttft_p50_ms": lambda run: median(run.ttft_ms),
        "itl_p99_ms": lambda run: quantiles(run.itl_ms, n=100)[-1],
    }
    summary = {
        state: {name: _ratio(runs, state, name, figures[name]) for name in figures} for state in ("cold", "warm")
    }
    memory = {
        side: Memory(
            weight_bytes=weights,
            kv_cache_tokens=1_953_125,
            max_concurrency=22_222.0,
        )
        for side, weights in (("baseline", 7_140_000), ("candidate", 3_650_000))
    }
    return Bench(
        load="closed:8",
        requests=40,
        out_tokens=11,
        source="generated",
        sizes=["336x336"],
        repeats=3,
        order=["baseline", "candidate", "candidate", "baseline", "baseline", "candidate"],
        tool="a streaming client",
        runs=runs,
        summary={"serve": summary},
        memory=memory,
    )


def _ratio(runs: list[LoadRun], state: str, name: str, figure: Callable[[LoadRun], float]) -> Ratio:
    before, after = ([figure(r) for r in runs if (r.state, r.side) == (state, s)] for s in ("baseline", "candidate"))
    ratios = [c / b for b, c in zip(before, after, strict=True)]
    return Ratio(
        baseline=median(before),
        candidate=median(after),
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        higher_is_better=not name.endswith("_ms"),
        interval=interval(ratios),
        unit="ms" if name.endswith("_ms") else "requests/s",
    )


def layer_errors(blocks: int = 4) -> dict[str, dict[str, float]]:
    rng = Random(6)
    kinds = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    names = [f"model.language_model.layers.{i}.{kind}" for i in range(blocks) for kind in kinds]
    return {name: {"text": rng.uniform(0.001, 0.01), "vision": rng.uniform(0.001, 0.02)} for name in names}


def make_results(name: str = "demo-awq", **changes: Any) -> Results:
    """Everything that results can hold, with hostile text wherever text comes from outside."""
    picture = io.BytesIO()
    Image.effect_noise((40, 30), 60).convert("RGB").save(picture, "PNG")
    png = base64.b64encode(picture.getvalue()).decode()
    rules = [
        GateRule(name="world: accuracy", verdict="pass", value="-0.2 points (-0.9 to +0.3)", limit="-1.0 points"),
        GateRule(name="size", verdict="pass", value="0.51x", limit="at most 0.60x", reason=HOSTILE),
    ]
    engine = {"name": "vllm", "version": "0.32.0", "device": "cpu"}
    values: dict[str, Any] = {
        "created": "2026-11-21T13:29:30+00:00",
        "version": "0.1.0",
        "machine": {"cpu": "EPYC", "cores": 2},
        "baseline": Side(name="demo", path="/models/demo", weight_bytes=7_140_000, engine=engine),
        "candidate": Side(
            name=name,
            path=f"/models/{name}",
            weight_bytes=3_650_000,
            scheme="awq",
            made=Provenance(source="demo", scheme="awq", options={"bits": 4}, versions={"vlmcompress": "0.1.0"}),
            layer_errors=layer_errors(),
            engine=engine,
        ),
        "suites": [make_suite()],
        "samples": make_samples(),
        "bench": make_bench(),
        "gate": Gate(name="default", verdict="pass", rules=rules),
        "pictures": {"q0": [png], "q6": [png, png], "q7": [png]},
    }
    return Results(**(values | changes))

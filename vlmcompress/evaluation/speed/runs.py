"""A whole benchmark: both sides served in turns, and their results compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlmcompress.engines import mlx
from vlmcompress.engines.vllm import speculation
from vlmcompress.evaluation import sides
from vlmcompress.evaluation.results import Bench, Memory, Results
from vlmcompress.evaluation.speed import measure
from vlmcompress.evaluation.speed.client import parse_load
from vlmcompress.evaluation.speed.prompts import open_prompts
from vlmcompress.evaluation.speed.serving import BenchPlan, SideName, abba, run_bursts
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent

TOOL = "vlmcompress's streaming client"
SERVED = ("vllm", "llamacpp")  # engines whose server tells how many tokens a chunk has


def run(
    candidate: str | Path,
    baseline: str | Path,
    *,
    load: str = "closed:8",
    requests: int | None = None,
    data: str | Path | None = None,
    out_tokens: int = 32,
    repeats: int = 3,
    slo: Mapping[str, float] | None = None,
    max_model_len: int | None = None,
    speculative: Mapping[SideName, str | None] | None = None,
    flags: Sequence[str] = (),
    seed: int = 0,
    progress: Progress = silent,
) -> Results:
    """Measure a candidate against its baseline on this machine, in vLLM, or in llama.cpp for GGUF.

    Args:
        candidate, baseline: checkpoint folders, or ids on the Hub.
        load: `closed:8` or `rate:2.5`; see `client.parse_load`.
        requests: number of requests in a burst; None: enough for the load.
        data: folder of images, `.jsonl` or `.parquet`; None: see `prompts.open_prompts`.
        out_tokens: number of tokens in every answer, so that both sides do equal work.
        repeats: number of bursts of each side.
        slo: limits in milliseconds of `ttft`, `tpot`, `e2e` for goodput.
        speculative: JSON of vLLM's `--speculative-config` for each side; None: without.
        flags: further flags of `vllm serve`, for both sides.

    Raises:
        UserError: a checkpoint, the data or a number is invalid, or the engine fails.
    """
    bounds = {"requests": (requests, 10**6), "out-tokens": (out_tokens, 10**6), "repeats": (repeats, 1000)}
    for name, (value, most) in bounds.items():
        if value is not None and not 1 <= value <= most:
            raise UserError(f"--{name} {str(value)[:40]}: must be from 1 to {most:,}")
    for model in map(Path, (baseline, candidate)):
        if mlx.is_mlx(model):
            log = f"vlmcompress serve {model} writes the tokens per second of each answer into its log"
            raise UserError(f"{model} is for MLX, whose server counts a stream's tokens at the end alone; {log}")
    paths: dict[SideName, Path] = {
        "baseline": sides.folder(hub.local(baseline), *SERVED),
        "candidate": sides.folder(hub.local(candidate), *SERVED),
    }
    arrival = parse_load(load)
    plan = BenchPlan(
        paths=paths,
        prompts=open_prompts(data, paths["candidate"], paths["baseline"], requests or arrival.default_requests, seed),
        load=arrival,
        out_tokens=out_tokens,
        repeats=repeats,
        slo=slo or {},
        seed=seed,
        max_model_len=max_model_len,
        flags=flags,
        speculative={
            side: json.dumps(speculation.read_speculative_config(paths[side], text))
            for side, text in (speculative or {}).items()
            if text
        },
    )
    runs, about = run_bursts(plan, progress)
    described, memory = {}, dict[str, Memory]()
    for side, path in paths.items():
        engine = {"name": "llamacpp" if plan.in_llama_cpp(side) else "vllm", "version": about[side].version}
        start = {"flags": about[side].flags, "start_seconds": about[side].start_seconds}
        described[side] = sides.side(path, {**engine, **start})
        if cache := about[side].cache:  # llama.cpp's server does not report it
            of = [run for run in runs if run.side == side]
            tokens = sum(run.text_tokens + run.visual_tokens + run.output_tokens for run in of)
            memory[side] = Memory(
                weight_bytes=described[side].weight_bytes,
                kv_cache_tokens=int(cache["kv_cache_size_tokens"]),
                max_concurrency=measure.requests_at_once(tokens / sum(run.completed for run in of), cache),
            )
    size = plan.prompts.size
    bench = Bench(
        load=str(plan.load),
        requests=len(plan.prompts.conversations),
        out_tokens=out_tokens,
        source=plan.prompts.source,
        sizes=[f"{size[0]}x{size[1]}"] if size else [],
        slo=dict(plan.slo),
        repeats=repeats,
        order=[side for side, _ in abba(repeats)],
        tool=TOOL,
        runs=runs,
        summary=measure.summarise(runs),
        memory=memory,
    )
    return Results(**sides.origin(), baseline=described["baseline"], candidate=described["candidate"], bench=bench)

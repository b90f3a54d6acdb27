"""A whole benchmark: both sides served in turns, and their results compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from vlmcompress.utils.progress import Progress
from vlmcompress.utils.text import parse_pixels

TOOL = "vlmcompress's streaming client"
SERVED = ("vllm", "llamacpp")  # engines that have a server


def run(
    candidate: str | Path,
    baseline: str | Path,
    *,
    warm: bool = True,
    progress: Progress | None = None,
    **settings: Any,
) -> Results:
    """Measure a candidate against its baseline on this machine, in vLLM, or in llama.cpp for GGUF.

    Args:
        warm: also measure the servers with their caches on; ignored if a side is GGUF.
        settings: see `plan`.

    Raises:
        UserError: a checkpoint, the data or a number is invalid, or the engine fails.
    """
    planned, progress = plan(candidate, baseline, **settings), progress or (lambda *_: None)
    llama_cpp = {side: planned.in_llama_cpp(side) for side in planned.paths}
    if any(llama_cpp.values()):
        warm = False  # llama.cpp has no cache of images
    runs, about = run_bursts(planned, "cold", progress)
    if warm:
        runs += run_bursts(planned, "warm", progress)[0]
    described, memory = {}, dict[str, Memory]()
    for side, path in planned.paths.items():
        engine = {"name": "llamacpp" if llama_cpp[side] else "vllm", "version": about[side].version}
        start = {"flags": about[side].flags, "start_seconds": about[side].start_seconds}
        described[side] = sides.side(path, {**engine, **start})
        if cache := about[side].cache:  # llama.cpp's server does not report it
            cold = [run for run in runs if (run.side, run.state) == (side, "cold")]
            tokens = sum(run.text_tokens + run.visual_tokens + run.output_tokens for run in cold)
            held = measure.requests_at_once(tokens / sum(run.completed for run in cold), cache)
            cache_tokens = int(cache["kv_cache_size_tokens"])
            memory[side] = Memory(
                weight_bytes=described[side].weight_bytes, kv_cache_tokens=cache_tokens, max_concurrency=held
            )
    bench = Bench(
        load=str(planned.load),
        requests=planned.requests,
        out_tokens=planned.out_tokens,
        source=planned.prompts.source,
        sizes=[f"{width}x{height}" for width, height in planned.prompts.sizes],
        slo=dict(planned.slo),
        repeats=planned.repeats,
        order=[side for side, _ in abba(planned.repeats)],
        tool=TOOL,
        runs=runs,
        summary=measure.summarise(runs),
        memory=memory,
    )
    return Results(**sides.origin(), baseline=described["baseline"], candidate=described["candidate"], bench=bench)


def plan(
    candidate: str | Path,
    baseline: str | Path,
    *,
    load: str = "closed:8",
    requests: int | None = None,
    data: str | Path | None = None,
    sizes: Sequence[str] = (),
    out_tokens: int = 32,
    repeats: int = 3,
    slo: Mapping[str, float] | None = None,
    max_model_len: int | None = None,
    speculative: Mapping[SideName, str | None] | None = None,
    flags: Sequence[str] = (),
    seed: int = 0,
) -> BenchPlan:
    """Plan the runs of `run`, with all checks that need no engine.

    Args:
        candidate, baseline: checkpoint folders, or ids on the Hub.
        load: `closed:8` or `rate:2.5`; see `client.parse_load`.
        requests: number of requests in a burst; None: enough for the load.
        data: folder of images, `.jsonl` or `.parquet`; None: see `prompts.open_prompts`.
        sizes: `WIDTHxHEIGHT` to which images are scaled in rotation, or in which they are generated without data.
        out_tokens: number of tokens in every answer, so that both sides do equal work.
        repeats: number of bursts of each side in each state.
        slo: limits in milliseconds of `ttft`, `tpot`, `e2e` for goodput.
        speculative: JSON of vLLM's `--speculative-config` for each side; None: without.
        flags: further flags of `vllm serve`, for both sides.
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
    drafting: dict[SideName, str | None] = {
        side: json.dumps(speculation.read_speculative_config(paths[side], text))
        for side, text in (speculative or {}).items()
        if text
    }
    arrival, pixels = parse_load(load), [parse_pixels(size, "--sizes", 28, 4096) for size in sizes]
    return BenchPlan(
        paths=paths,
        prompts=open_prompts(data, pixels, paths["candidate"], paths["baseline"], seed),
        load=arrival,
        requests=requests or arrival.default_requests,
        out_tokens=out_tokens,
        repeats=repeats,
        slo=slo or {},
        seed=seed,
        max_model_len=max_model_len,
        flags=tuple(flags),
        speculative=drafting,
    )

"""A whole benchmark: both sides served, then run offline, and their results compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmcompress.engines import mlx
from vlmcompress.engines.vllm import speculation
from vlmcompress.engines.vllm.served_model import describe
from vlmcompress.evaluation import sides
from vlmcompress.evaluation.results import Bench, Memory, Results
from vlmcompress.evaluation.speed import measure
from vlmcompress.evaluation.speed.client import parse_load
from vlmcompress.evaluation.speed.prompts import open_prompts
from vlmcompress.evaluation.speed.serving import BenchPlan, SideName, abba, run_bursts, run_offline
from vlmcompress.models import build_meta_model
from vlmcompress.quantization.plan import kv_cache
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
    offline: bool = True,
    progress: Progress | None = None,
    **settings: Any,
) -> Results:
    """Measure a candidate against its baseline on this machine, in vLLM, or in llama.cpp for GGUF.

    Args:
        warm: also measure the servers with their caches on; ignored if a side is GGUF.
        offline: also measure the engine without a server; ignored if a side is GGUF.
        settings: see `plan`.

    Raises:
        UserError: a checkpoint, the data or a number is invalid, or the engine fails.
    """
    planned, progress = plan(candidate, baseline, **settings), progress or (lambda *_: None)
    llama_cpp = {side: planned.in_llama_cpp(side) for side in planned.paths}
    if any(llama_cpp.values()):
        warm = offline = False  # llama.cpp has no cache of images, and is measured as a server only
    runs, about = run_bursts(planned, "cold", progress)
    if warm:
        runs += run_bursts(planned, "warm", progress)[0]
    devices: dict[SideName, dict[str, Any]] = {"baseline": {}, "candidate": {}}
    if offline:
        offline_runs, devices = run_offline(planned, runs, progress)
        runs += offline_runs
    described = {}
    for side, path in planned.paths.items():
        engine = {"name": "llamacpp" if llama_cpp[side] else "vllm", "version": about[side].version, **devices[side]}
        start = {"flags": about[side].flags, "start_seconds": about[side].start_seconds}
        described[side] = sides.side(path, {**engine, **start})
    by_side: dict[str, Memory] = {}
    for side, path in planned.paths.items():
        cache = about[side].cache
        if not cache:  # llama.cpp's server does not report it
            continue
        per_token = kv_bytes_per_token(path, cache["cache_dtype"])
        cold = [run for run in runs if (run.side, run.mode, run.state) == (side, "serve", "cold")]
        tokens = sum(run.text_tokens + run.visual_tokens + run.output_tokens for run in cold)
        if per_token:
            mean = tokens / sum(run.completed for run in cold)
            by_side[side] = measure.memory(described[side].weight_bytes, per_token, mean, cache)
    bench = Bench(
        load=str(planned.load),
        requests=planned.requests,
        out_tokens=planned.out_tokens,
        source=planned.prompts.source,
        sizes=[f"{width}x{height}" for width, height in planned.prompts.sizes],
        slo=dict(planned.slo),
        repeats=planned.repeats,
        order=[side for side, _ in abba(planned.repeats)],
        tool=TOOL + (" and vLLM's LLM.chat" if offline else ""),
        runs=runs,
        summary=measure.summarise(runs),
        memory=by_side,
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
    resident: bool = False,
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
        resident: keep both servers running, one of them idle, instead of starting one per turn.
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
        resident=resident,
        max_model_len=max_model_len,
        flags=tuple(flags),
        speculative=drafting,
    )


def kv_bytes_per_token(folder: Path, cache_dtype: str) -> int | None:
    """Bytes of the KV cache for a token.

    Args:
        folder: a checkpoint.
        cache_dtype: the engine's type of the KV cache; `auto` is the type of the activations.

    Returns:
        The bytes; None for unknown cache types and for attention other than full (latent, sliding windows, linear layers),
        where they depend on the position.
    """
    width = kv_cache.TYPES.get(
        next((name for name, flag in kv_cache.FLAGS.items() if flag == cache_dtype), cache_dtype)
    )
    try:
        decoder = describe(build_meta_model(folder, weights=False, supported_only=False))
    except UserError:
        return None
    layers = decoder.layers(1, width.number, width.scale) if width else []
    if len(layers) < len(decoder.blocks) or any(layer.window or layer.state_bytes for layer in layers):
        return None
    return sum(layer.token_bytes for layer in layers)

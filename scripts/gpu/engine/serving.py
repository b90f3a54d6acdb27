"""One scheme served with all, half and a quarter of its visual tokens: by the parts of `vlmcompress bench`.

`bench` compares two checkpoints and starts a server for each turn. Twelve variants would take an hour of starts, so the three
of a scheme are up together here and asked one at a time, in an order that is reversed in the second turn. All have a KV cache
of the same bytes. `latency` is one client, `load` many; caches are off, which the servers' own counters must confirm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from gpu import shapes
from gpu.part import Failed, Place
from gpu.steps import SCHEMES

SHAPE = "qwen2.5-vl-7b"
KEPT = {"full": 1.0, "half": 0.5, "quarter": 0.25}
TURNS = 2
KV_BYTES = 4 * 2**30  # of each server on a GPU
SIZE, TINY_SIZE = (896, 896), (112, 112)  # 1,024 and 16 visual tokens
LOADS = {"latency": (1, 8, 4), "load": (32, 96, 64)}  # clients, requests, tokens of an answer
TINY_LOADS = {"latency": (1, 2, 2), "load": (2, 4, 4)}


def run(place: Place, scheme: str) -> dict[str, Any]:
    """Serve a scheme's checkpoints and measure each."""
    from vlmcompress.evaluation.speed.prompts import open_prompts

    full = checkpoint(place, scheme)
    shares = {name: share for name, share in KEPT.items() if share != 0.5 or not place.tiny or scheme == "bf16"}
    folders = {name: shapes.reduced(full, f"dart:{share}") if share < 1 else full for name, share in shares.items()}
    loads = TINY_LOADS if place.tiny else LOADS
    size = TINY_SIZE if place.tiny else SIZE
    most = max(requests for _, requests, _ in loads.values())
    conversations = open_prompts(shapes.calibration(place), full, full, most, 0, size).conversations
    bursts = {load: conversations[:requests] for load, (_, requests, _) in loads.items()}
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {name: {load: [] for load in loads} for name in folders}
    with servers(place, folders) as up:
        for running in up.values():
            burst(running, bursts["load"][:8], 4, loads["load"][2])  # not measured
        for turn in range(1 if place.tiny else TURNS):
            for load, (clients, _, tokens) in loads.items():
                for name in list(up)[:: 1 if turn % 2 == 0 else -1]:
                    rows[name][load].append(burst(up[name], bursts[load], clients, tokens))
        result = {name: described(up[name], rows[name]) for name in up}
    visual = {name: figures["visual_tokens"] for name, figures in result.items()}
    if any(abs(count / visual["full"] - shares[name]) > 0.02 for name, count in visual.items()):
        raise Failed(f"images have {visual} tokens, which are not the shares {shares}", result)
    return {"shape": SHAPE, "scheme": scheme, "loads": {k: list(v) for k, v in loads.items()}, "kept": result}


def checkpoint(place: Place, scheme: str) -> Path:
    """The scheme's checkpoint of full depth: the one that `quantize` left, or a new one."""
    if scheme == "bf16":
        return shapes.model(place, SHAPE, "full")
    module, options = SCHEMES[scheme]
    return shapes.quantized(place, SHAPE, "full", module, options, scheme)


@contextlib.contextmanager
def servers(place: Place, folders: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """All servers, up: three at a time on a GPU, as each takes only its share; two on a CPU."""
    import torch

    from vlmcompress.engines.vllm.serve import vllm_server
    from vlmcompress.evaluation.speed.serving import FLAGS

    limits = ["--max-model-len", "1024" if place.tiny else "4096"]
    if torch.cuda.is_available():
        limits += ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(KV_BYTES)]
    flags, logs = [*FLAGS, *limits], place.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:

        def start(name: str) -> Any:
            log = logs / f"server-{folders[name].parent.name}-{folders[name].name}.log"
            return stack.enter_context(vllm_server(folders[name], flags=flags, images=1, timeout=480, log=log))

        with ThreadPoolExecutor(3 if torch.cuda.is_available() else 2) as starters:
            up = dict(zip(folders, starters.map(start, folders), strict=True))
        yield up


def burst(running: Any, conversations: Sequence[Any], clients: int, tokens: int) -> dict[str, Any]:
    """Send conversations and check that all were answered in full, from no cache; returns the figures."""
    from vlmcompress.evaluation.speed import client, counters, measure
    from vlmcompress.evaluation.speed.client import Load

    before = counters.counters(running)
    bodies = [client.encode_request(running.name, messages, tokens) for messages in conversations]
    outcomes, seconds = client.send(running.url, bodies, Load("closed", clients))
    counted = counters.counters(running).since(before)
    if bad := [outcome for outcome in outcomes if outcome.error or outcome.output_tokens != tokens]:
        first = bad[0].error or f"{bad[0].output_tokens} of {tokens} tokens"
        raise Failed(f"{running.name}: {len(bad)} of {len(outcomes)} requests failed, the first: {first}")
    if hits := counted.prefix_hits + counted.media_hits:
        raise Failed(f"{running.name} took {hits:g} tokens or images from a cache that should be off")
    record = measure.burst_record(outcomes, seconds, side="candidate", repeat=0, slo={}, counters=counted)
    longest = max(outcomes, key=lambda outcome: outcome.prompt_tokens)
    return {
        **measure.figures(record),
        "visual": longest.visual_tokens,
        "tokens": longest.prompt_tokens + longest.output_tokens,
    }


def described(running: Any, rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of a server: medians over its turns, and the requests that its KV cache holds at once."""
    from vlmcompress.evaluation.speed import counters, measure

    cache = counters.cache_config(running)
    longest = max(row["tokens"] for row in rows["load"])

    def figure(load: str, name: str) -> float:
        return round(median(row[name] for row in rows[load]), 3)

    return {
        "visual_tokens": rows["load"][0]["visual"],
        "start_seconds": running.start_seconds,
        "ttft_ms": figure("latency", "ttft_p50_ms"),
        "requests_per_second": figure("load", "request_throughput"),
        "load_ttft_p50_ms": figure("load", "ttft_p50_ms"),
        "load_ttft_p99_ms": figure("load", "ttft_p99_ms"),
        "tpot_ms": figure("load", "tpot_p50_ms"),
        "fits": measure.requests_at_once(longest, cache),
    }

#!/usr/bin/env python
"""What a reducer of visual tokens wins in vLLM's server: a random model of about 0.5 B parameters, images of 1,024 tokens.

scripts/bench_serving.py --work DIR --prepare        write the checkpoints: minutes, once
scripts/bench_serving.py --work DIR [--groups cold,warm,quantized] [--turns 2] [--out eval/serving.json]
scripts/bench_serving.py --render eval/serving.json  the README's table

The servers of a group are up together and asked one at a time, in an order that is reversed from turn to turn, so that each
ratio is between neighbours in time and a machine that drifts favours nobody. Images are unique, answers of equal length.

latency: one client. TTFT is the time from sending to the first token: upload, decoding the image, encoder, prefill.
load: twelve clients. Requests per second, TTFT with its queue, and how many requests were seen running at once.
again: four clients, warm: everything they ask has been asked before, so that caches hold it.

In cold groups prefix cache and image processor cache are off, and that nothing came from one is checked. `floor` keeps one
visual token, so what its TTFT is of the full one's is the part of prefill that no reducer can save. The KV cache has the
same size everywhere: room for four full requests. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import serving_table
from serving_model import SIDE, Variant, prepare

from vlmcompress import sides
from vlmcompress.bench import client, counters, measure, memory
from vlmcompress.bench.load import Load
from vlmcompress.bench.prompts import Prompts, open_prompts
from vlmcompress.bench.serving import ALWAYS, FLAGS
from vlmcompress.chosen import parse as parse_reducer
from vlmcompress.engines.vllm.launch import Server, server
from vlmcompress.errors import UserError
from vlmcompress.results import State
from vlmcompress.terminal import Progress

METHOD = "dart"
SHARES = ("1/2", "1/4", "1/9")
FLOOR = f"uniform:1/{SIDE * SIDE}"
REDUCED = tuple(f"{METHOD}:{share}" for share in SHARES)
BF16 = tuple(Variant("bf16", reduce) for reduce in ("", *REDUCED))
GROUPS: dict[str, tuple[Variant, ...]] = {
    "cold": (*BF16, Variant("bf16", FLOOR)),
    "warm": BF16,
    "quantized": (
        Variant("bf16"),
        *(Variant(scheme, reduce) for scheme in ("int8", "rtn") for reduce in ("", REDUCED[1])),
    ),
}


@dataclass(frozen=True)
class Traffic:
    """One burst: `clients` send `requests` requests about `images` different images, for `tokens` tokens each."""

    clients: int
    requests: int
    images: int
    tokens: int


LOADS = {"latency": Traffic(1, 4, 4, 4), "load": Traffic(12, 12, 12, 16), "again": Traffic(4, 12, 4, 16)}
WARM_UP = 2  # requests of a cold group
LOOK = 0.5  # seconds between two looks at how many requests are running
BLOCK, BLOCKS = 32, 144  # of the KV cache: 143 can be used, a full request takes 34
RESIDENT = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048")


@contextlib.contextmanager
def servers(group: str, folders: Mapping[Variant, Path], progress: Progress) -> Iterator[dict[Variant, Server]]:
    """All servers of a group, up; two start at a time."""
    flags = [*FLAGS[state(group)], *ALWAYS, *RESIDENT]
    with contextlib.ExitStack() as stack:

        def start(variant: Variant) -> Server:
            return stack.enter_context(server(folders[variant], flags=flags, images=1))

        progress(f"{group}: starting vLLM", 0, len(folders))
        with ThreadPoolExecutor(2) as starters:
            up = dict(zip(folders, starters.map(start, folders), strict=True))
        yield up


def state(group: str) -> State:
    return "warm" if group == "warm" else "cold"


@contextlib.contextmanager
def most_running(running: Server) -> Iterator[list[float]]:
    """A list whose only entry is the most requests that the server has had running at once, as far as one looks."""
    most, stop = [0.0], threading.Event()

    def look() -> None:
        while not stop.wait(LOOK):
            found = [
                float(value) for name, _, value in counters.exposed(running) if name == "vllm:num_requests_running"
            ]
            most[0] = max(most[0], *found)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        stop.set()
        watcher.join()


def burst(running: Server, prompts: Prompts, number: int, kind: str) -> tuple[list[client.Outcome], float, float]:
    """Outcomes, seconds, and the most requests seen running, of one burst of a kind of load."""
    load = LOADS[kind]
    distinct = prompts.burst(number, load.images) * (load.requests // load.images)
    bodies = [client.encode(running.name, messages, load.tokens) for messages in distinct]
    with most_running(running) as most:
        outcomes, seconds = client.send(running.url, bodies, Load("closed", load.clients))
    return outcomes, seconds, most[0]


def run_group(group: str, folders: Mapping[Variant, Path], turns: int, progress: Progress) -> list[dict[str, Any]]:
    """All bursts of a group, as rows."""
    prompts = open_prompts(None, [(448, 448)], *(2 * (next(iter(folders.values())),)), seed=0)
    kinds = ("again",) if group == "warm" else ("latency", "load")
    rows: list[dict[str, Any]] = []
    with servers(group, folders, progress) as up:
        for number, running in enumerate(up.values()):
            progress(f"{group}: warming up", number, len(up))
            warm_up(running, prompts, group)
        capacity = {variant: counters.cache_config(running) for variant, running in up.items()}
        for turn in range(turns):
            for kind in kinds:
                for variant in list(up)[:: 1 if turn % 2 == 0 else -1]:
                    progress(f"{group} {kind} {variant}", len(rows), turns * len(kinds) * len(up))
                    before = counters.counters(up[variant])
                    number = 0 if group == "warm" else 1 + turn
                    outcomes, seconds, most = burst(up[variant], prompts, number, kind)
                    after = counters.counters(up[variant])
                    check(group, variant, outcomes, after, before, kind)
                    row = {"group": group, "variant": str(variant), "load": kind, "turn": turn, "most_running": most}
                    rows.append(row | figures(outcomes, seconds) | fits(folders[variant], outcomes, capacity[variant]))
    return rows


def warm_up(running: Server, prompts: Prompts, group: str) -> None:
    """Requests that are not measured: of images that don't come again, or (warm) of those that will."""
    count, number = (LOADS["again"].images, 0) if group == "warm" else (WARM_UP, 10**6)
    bodies = [client.encode(running.name, messages, LOADS["load"].tokens) for messages in prompts.burst(number, count)]
    outcomes, _ = client.send(running.url, bodies, Load("closed", 2))
    if bad := [outcome.error for outcome in outcomes if outcome.error]:
        raise UserError(f"{running.name} could not answer: {bad[0]}")


def check(
    group: str,
    variant: Variant,
    outcomes: Sequence[client.Outcome],
    after: counters.Counters,
    before: counters.Counters,
    kind: str,
) -> None:
    """The work of a burst is what it claims to be: every request answered, in full, with as many visual tokens as the reducer
    leaves, and nothing or (warm) something from a cache."""
    tokens, kept = LOADS[kind].tokens, visual_tokens(variant)
    for outcome in outcomes:
        if outcome.error or outcome.output_tokens != tokens or outcome.visual_tokens != kept:
            raise UserError(
                f"{group} {variant}: {outcome.error or 'no error'}, {outcome.output_tokens} of {tokens} tokens, "
                f"{outcome.visual_tokens} of {kept} visual tokens"
            )
    hits = (after.prefix_hits - before.prefix_hits, after.media_hits - before.media_hits)
    if state(group) == "cold" and (any(hits) or any(outcome.cached_tokens for outcome in outcomes)):
        raise UserError(f"{group} {variant}: a cold run took {hits[0]:g} tokens and {hits[1]:g} images from a cache")
    if state(group) == "warm" and not all(hits):
        raise UserError(f"{group} {variant}: a warm run found nothing in a cache")


def visual_tokens(variant: Variant) -> int:
    """Of an image."""
    if not variant.reduce:
        return SIDE * SIDE
    chosen = parse_reducer(variant.reduce)
    return chosen.module.budget((1, SIDE, SIDE), chosen.options)


def figures(outcomes: Sequence[client.Outcome], seconds: float) -> dict[str, Any]:
    """What was measured."""
    run = measure.serve_run(
        outcomes, seconds, side="candidate", state="cold", repeat=0, slo={}, media_hits=0
    )  # neither side nor state is used here
    return {
        "visual_tokens": outcomes[0].visual_tokens,
        "request_throughput": measure.figures(run)["request_throughput"],
        "ttft_ms": run.ttft_ms,
        "e2e_ms": run.e2e_ms,
    }


def fits(folder: Path, outcomes: Sequence[client.Outcome], cache: Mapping[str, str]) -> dict[str, float]:
    """How many requests like these the KV cache holds at once."""
    config = json.loads((folder / "config.json").read_text())
    per_token = memory.kv_bytes_per_token(config, cache["cache_dtype"])
    assert per_token
    longest = max(outcome.prompt_tokens + outcome.output_tokens for outcome in outcomes)
    return {"fits": memory.memory(0, per_token, longest, cache).max_concurrency}


def reducer_ms(rounds: int = 20) -> dict[str, float]:
    """Milliseconds that each reducer takes for one image's tokens, as the plugin calls it: to choose and to gather."""
    import torch
    from serving_model import TEXT

    from vlmcompress import reducers
    from vlmcompress.reducers import Signals

    features = torch.randn(SIDE * SIDE, TEXT["hidden_size"], dtype=torch.bfloat16)
    found = {}
    for reduce in REDUCED:
        chosen, times = parse_reducer(reduce), []
        for _ in range(rounds):
            start = time.perf_counter()
            signals = Signals((1, SIDE, SIDE), features=features)
            reducers.reduce(chosen.module, signals, chosen.options).apply(features)
            times.append(time.perf_counter() - start)
        found[reduce] = 1000 * sorted(times)[rounds // 2]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for the checkpoints: 4 GB")
    parser.add_argument("--prepare", action="store_true", help="write the checkpoints, measure nothing")
    parser.add_argument("--groups", default="cold,warm,quantized")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28, help="of the language model; fewer for a trial")
    parser.add_argument("--out", type=Path, help="write the rows and figures here")
    parser.add_argument("--render", type=Path, metavar="FILE", help="print the tables of what --out wrote")
    options = parser.parse_args()
    if options.render:
        print(serving_table.render(json.loads(options.render.read_text())))
        return
    if options.work is None:
        parser.error("--work is needed: a folder for the checkpoints")
    groups = options.groups.split(",")
    wanted = dict.fromkeys(variant for group in groups for variant in GROUPS[group])
    folders = {variant: prepare(variant, options.work, options.layers) for variant in wanted}
    if options.prepare:
        return
    progress, began, rows = Progress(), time.monotonic(), []
    for group in groups:
        rows += run_group(group, {variant: folders[variant] for variant in GROUPS[group]}, options.turns, progress)
    progress.close()
    seconds = round(time.monotonic() - began)
    found = {**sides.origin(), "seconds": seconds, "layers": options.layers, "reducer_ms": reducer_ms(), "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(serving_table.render(found))
    print(json.dumps(serving_table.summarise(found)))


if __name__ == "__main__":
    main()

"""Send one burst of `scripts/measure/bench_serving.py` to a running server, check it, and measure."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_model import SIDE, Variant

from vlmcompress.engines.vllm.serve import Server
from vlmcompress.evaluation.results import State
from vlmcompress.evaluation.speed import client, counters, measure
from vlmcompress.evaluation.speed.client import Load
from vlmcompress.evaluation.speed.prompts import Prompts
from vlmcompress.reduction.choice import parse_reducer as parse_reducer
from vlmcompress.utils.errors import UserError


@dataclass(frozen=True)
class Traffic:
    """One burst: `clients` ask about `images` different images, each `repeats` times, for `tokens` tokens a request."""

    clients: int
    images: int
    repeats: int
    tokens: int


LOADS = {"latency": Traffic(1, 8, 1, 4), "load": Traffic(12, 12, 1, 16), "again": Traffic(4, 4, 3, 16)}
FIRST = {"latency": 1, "load": 10**4, "again": 0}  # number of a kind's first burst: no two kinds share an image
WAKING = itertools.count(10**6)  # numbers of images that are not measured
WARM_UP = LOADS["again"].images  # requests to a server that has just started
LOOK = 0.5  # seconds between two looks at how many requests are running


def state(group: str) -> State:
    """State of the caches in a group: cold or warm."""
    return "warm" if group == "warm" else "cold"


@contextlib.contextmanager
def most_running(running: Server) -> Iterator[list[float]]:
    """Within the context, a list whose only entry is the most requests seen running on the server at once."""
    most, stop = [0.0], threading.Event()

    def look() -> None:
        while not stop.wait(LOOK):
            metrics = counters.metrics(running)
            most[0] = max(most[0], *(float(value) for name, _, value in metrics if name == "vllm:num_requests_running"))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        stop.set()
        watcher.join()


def burst(
    running: Server, prompts: Prompts, group: str, variant: Variant, folder: Path, kind: str, turn: int
) -> dict[str, Any]:
    """Send a burst, after a request that is not measured, and check it; returns its part of a row."""
    load = LOADS[kind]
    distinct = prompts.burst(FIRST[kind] + (0 if group == "warm" else turn), load.images)
    bodies = [client.encode_request(running.name, messages, load.tokens) for messages in distinct]
    warm_up(running, prompts, group, 1)
    before = counters.counters(running)
    with most_running(running) as most:
        outcomes, seconds = client.send(running.url, bodies * load.repeats, Load("closed", load.clients))
    counted = counters.counters(running).since(before)
    check(group, variant, outcomes, counted, kind)
    run = measure.burst_record(
        outcomes, seconds, side="candidate", state="cold", repeat=0, slo={}, counters=counted
    )  # neither side nor state is used here
    return {
        "clients": load.clients,
        "most_running": most[0],
        "visual_tokens": outcomes[0].visual_tokens,
        "cached": sum(outcome.cached_tokens for outcome in outcomes)
        / sum(outcome.prompt_tokens for outcome in outcomes),
        "request_throughput": measure.figures(run)["request_throughput"],
        "ttft_ms": run.ttft_ms,
        "e2e_ms": run.e2e_ms,
        "fits": fits(outcomes, counters.cache_config(running)),
    }


def warm_up(running: Server, prompts: Prompts, group: str, count: int) -> None:
    """Send requests that are not measured: of images that don't come again, or (warm) of those that will."""
    serials = range(count) if group == "warm" else itertools.islice(WAKING, count)
    distinct = [prompts.burst(serial, 1)[0] for serial in serials]
    bodies = [client.encode_request(running.name, messages, LOADS["load"].tokens) for messages in distinct]
    outcomes, _ = client.send(running.url, bodies, Load("closed", 2))
    if bad := [outcome.error for outcome in outcomes if outcome.error]:
        raise UserError(f"{running.name} could not answer: {bad[0]}")


def check(
    group: str, variant: Variant, outcomes: Sequence[client.Outcome], counted: counters.Counters, kind: str
) -> None:
    """Check the work of a burst: every request answered, in full, with as many visual tokens as the reducer leaves, and
    nothing or (warm) something from a cache."""
    tokens, kept = LOADS[kind].tokens, visual_tokens(variant)
    for outcome in outcomes:
        if outcome.error or outcome.output_tokens != tokens or outcome.visual_tokens != kept:
            raise UserError(
                f"{group} {variant}: {outcome.error or 'no error'}, {outcome.output_tokens} of {tokens} tokens, "
                f"{outcome.visual_tokens} of {kept} visual tokens"
            )
    hits = (counted.prefix_hits, counted.media_hits)
    if state(group) == "cold" and (any(hits) or any(outcome.cached_tokens for outcome in outcomes)):
        raise UserError(f"{group} {variant}: a cold run took {hits[0]:g} tokens and {hits[1]:g} images from a cache")
    if state(group) == "warm" and not all(hits):
        raise UserError(f"{group} {variant}: a warm run found nothing in a cache")


def visual_tokens(variant: Variant) -> int:
    """Number of visual tokens that an image keeps in a variant."""
    if not variant.reduce:
        return SIDE * SIDE
    chosen = parse_reducer(variant.reduce)
    return chosen.reducer.budget((1, SIDE, SIDE))


def fits(outcomes: Sequence[client.Outcome], cache: Mapping[str, str]) -> float:
    """Number of requests like these that the KV cache holds at once."""
    return measure.requests_at_once(max(o.prompt_tokens + o.output_tokens for o in outcomes), cache)

"""Bursts of requests against servers of both sides, in ABBA order.

**cold**: prefix cache and image processor cache off and no image sent twice; that nothing came from a cache is checked
in the server's counters. With both off vLLM also tells equal images apart, so its encoder cache finds nothing.
**warm**: caches on, and one burst again and again after a first time that isn't measured. Never compare cold with warm.

Two engines that run at the same time disturb each other, so only one is ever asked. The other is stopped (a server is
started for every turn, which always fits into memory), or `resident`: up, but idle. On two CPU cores an idle vLLM 0.32
server was seen to take 0.8% of the machine; on a GPU both have to fit, see `--gpu-memory-utilization`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlmcompress.bench import client, counters, measure
from vlmcompress.bench.client import Outcome
from vlmcompress.bench.load import Load
from vlmcompress.bench.prompts import Prompts
from vlmcompress.bench.schedule import SideName, abba
from vlmcompress.common.progress import Progress
from vlmcompress.engines.local import last_words
from vlmcompress.engines.vllm.launch import Server, server
from vlmcompress.errors import UserError
from vlmcompress.results import LoadRun, State

FLAGS: dict[State, tuple[str, ...]] = {
    "cold": ("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"),
    "warm": ("--enable-prefix-caching",),
}
ALWAYS = ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log")


@dataclass(frozen=True)
class Plan:
    """Settings of a benchmark. `requests` of `out_tokens` tokens make a burst; `flags` are further ones of `vllm serve`.

    `speculative`: JSON of vLLM's `--speculative-config`, for each side.
    """

    paths: Mapping[SideName, Path]
    prompts: Prompts
    load: Load
    requests: int
    out_tokens: int
    repeats: int
    slo: Mapping[str, float]
    seed: int = 0
    resident: bool = False
    max_model_len: int | None = None
    flags: Sequence[str] = ()
    speculative: Mapping[SideName, str | None] = field(default_factory=dict)
    timeout: float = 600.0


@dataclass
class About:
    """The description that a side's last server gave of itself."""

    version: str = ""
    flags: list[str] = field(default_factory=list)
    start_seconds: float = 0.0
    cache: dict[str, str] = field(default_factory=dict)


def serve(plan: Plan, state: State, progress: Progress) -> tuple[list[LoadRun], dict[SideName, About]]:
    """Run all bursts of one state.

    Raises:
        UserError: a server can't start or dies, no request is answered, or a run is not what its state says.
    """
    runs: list[LoadRun] = []
    about: dict[SideName, About] = {"baseline": About(), "candidate": About()}
    with _servers(plan, state, about, progress) as side_server:
        for side, repeat in abba(plan.repeats):
            running = side_server(side)
            before = counters.counters(running)
            label = f"{state} {side} {repeat + 1}/{plan.repeats}"
            outcomes, duration = burst(plan, running, repeat if state == "cold" else 0, label, progress, repeat)
            seen = counters.counters(running).since(before)
            check(plan, state, running, outcomes, seen.prefix_hits, int(seen.media_hits))
            runs.append(
                measure.serve_run(outcomes, duration, side=side, state=state, repeat=repeat, slo=plan.slo, seen=seen)
            )
    return runs, about


@contextlib.contextmanager
def _servers(
    plan: Plan, state: State, about: dict[SideName, About], progress: Progress
) -> Iterator[Callable[[SideName], Server]]:
    """Within the context, a function that gives the server of a side, started and warmed up."""
    flags = [*FLAGS[state], *ALWAYS, *plan.flags]
    up: dict[SideName, Server] = {}
    with contextlib.ExitStack() as stack:

        def get(side: SideName) -> Server:
            if side not in up:
                if not plan.resident:
                    stack.close()
                    up.clear()
                progress(f"{state} {side}: starting vLLM", 0, 1)
                images, length = plan.prompts.images, plan.max_model_len
                drafting = plan.speculative.get(side)
                started = server(
                    plan.paths[side], flags=flags, images=images, max_model_len=length, speculative=drafting
                )
                up[side] = running = stack.enter_context(started)
                # An unmeasured burst: of images that are not used again, or (warm) of the ones that will be.
                number = plan.repeats if state == "cold" else 0
                outcomes, _ = burst(plan, running, number, f"{state} {side}: warming up", progress, None)
                _check_answered(outcomes, running)
                cache = counters.cache_config(running)
                about[side] = About(counters.version(running), flags, running.start_seconds, cache)
            return up[side]

        for side in plan.paths if plan.resident else ():  # both before the first burst: all have an idle neighbour
            get(side)
        yield get


def burst(
    plan: Plan, running: Server, number: int, label: str, progress: Progress, repeat: int | None
) -> tuple[list[Outcome], float]:
    """Send one burst, encoded before the clock starts. An open load arrives anew in each repeat; repeat None is a warm-up,
    by eight clients."""
    messages = plan.prompts.burst(number, plan.requests)
    bodies = [client.encode(running.name, conversation, plan.out_tokens) for conversation in messages]
    return client.send(
        running.url,
        bodies,
        Load("closed", 8) if repeat is None else plan.load,
        seed=plan.seed * 2**16 + (repeat or 0),
        timeout=plan.timeout,
        done=lambda count: progress(label, count, len(bodies)),
    )


def _check_answered(outcomes: Sequence[Outcome], running: Server) -> list[Outcome]:
    good = [outcome for outcome in outcomes if not outcome.error]
    if not good:
        raise UserError(
            f"{running.name} answered none of {len(outcomes)} requests, the first failed with "
            f"{outcomes[0].error}{last_words(running.log_path)}"
        )
    return good


def check(
    plan: Plan, state: State, running: Server, outcomes: Sequence[Outcome], prefix_hits: float, media_hits: int
) -> None:
    """Check that a run did the work of its state: images processed, caches used or not, all tokens generated."""
    good = _check_answered(outcomes, running)
    short = min(outcome.output_tokens for outcome in good)
    if short != plan.out_tokens:
        raise UserError(
            f"{running.name} stopped after {short} of {plan.out_tokens} tokens; lower --out-tokens or raise the "
            "context length with --max-model-len"
        )
    if not all(outcome.visual_tokens for outcome in good):
        raise UserError(f"{running.name} counts no visual tokens, so it did not process the images; is it a VLM?")
    cached = sum(outcome.cached_tokens for outcome in good)
    if state == "cold" and (cached or prefix_hits or media_hits):
        raise UserError(
            f"a cold run of {running.name} took {max(cached, prefix_hits):g} tokens and {media_hits} images from a "
            "cache; leave out flags that turn caches on"
        )
    if state == "warm" and not media_hits:
        raise UserError(f"a warm run of {running.name} found no image in the cache; leave out flags that turn it off")

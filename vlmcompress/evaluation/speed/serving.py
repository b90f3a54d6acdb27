"""Bursts of requests for both sides, against one server at a time.

The order is baseline, candidate, candidate, baseline, baseline, candidate, ... Machines drift (they warm up, other load comes
and goes). With A B B A a drift that is linear in time adds the same to both sides over two repeats, while A B A B favours one
of them. The two runs of a repeat are adjacent in time, so that drift hardly affects their ratio; adjacent turns of one side
need no restart of its engine.

**cold**: prefix cache and image processor cache off, and no image sent twice; the server's counters verify that nothing came
from a cache. With both off, vLLM also distinguishes equal images, so that its encoder cache is not used.
**warm**: caches on, and one burst repeated after a first, unmeasured time. Never compare cold with warm.

Two active engines disturb each other, so a server is started for every turn and the other side's is stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from vlmcompress.engines import llamacpp_server
from vlmcompress.engines.local import last_words
from vlmcompress.engines.vllm.serve import Server, vllm_server
from vlmcompress.evaluation.results import LoadRun, State
from vlmcompress.evaluation.speed import client, counters, measure
from vlmcompress.evaluation.speed.client import Load, Outcome
from vlmcompress.evaluation.speed.prompts import Prompts
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress

SideName = Literal["baseline", "candidate"]
Turn = tuple[SideName, int]

FLAGS: dict[State, tuple[str, ...]] = {
    "cold": ("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"),
    "warm": ("--enable-prefix-caching",),
}
ALWAYS = ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log")

MOST_SLOTS = 8  # maximum concurrent requests of llama.cpp's server, which otherwise equals the number of clients


@dataclass(frozen=True)
class BenchPlan:
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
    max_model_len: int | None = None
    flags: Sequence[str] = ()
    speculative: Mapping[SideName, str | None] = field(default_factory=dict)
    timeout: float = 600.0

    def in_llama_cpp(self, side: SideName) -> bool:
        """Whether a side is GGUF, which llama.cpp serves."""
        return llamacpp_server.is_gguf(self.paths[side])


@dataclass
class About:
    """The description of a side's last server."""

    version: str = ""
    flags: list[str] = field(default_factory=list)
    start_seconds: float = 0.0
    cache: dict[str, str] = field(default_factory=dict)


def abba(repeats: int) -> list[Turn]:
    """`(side, repeat)` in the order of the runs; the two sides of a repeat are adjacent."""
    sides: tuple[SideName, SideName] = ("baseline", "candidate")
    return [(side, repeat) for repeat in range(repeats) for side in (sides if repeat % 2 == 0 else sides[::-1])]


def run_bursts(plan: BenchPlan, state: State, progress: Progress) -> tuple[list[LoadRun], dict[SideName, About]]:
    """Run all bursts of one state.

    Raises:
        UserError: a server can't start or dies, no request is answered, or a run violates its state.
    """
    runs: list[LoadRun] = []
    about: dict[SideName, About] = {}
    for side, turns in groupby(abba(plan.repeats), key=lambda turn: turn[0]):
        with _server(plan, side, state, about, progress) as running:
            for _, repeat in turns:
                before = counters.counters(running)
                label = f"{state} {side} {repeat + 1}/{plan.repeats}"
                number = repeat if state == "cold" else 0
                outcomes, duration = burst(plan, side, running, number, label, progress, repeat)
                counted = counters.counters(running).since(before)
                if plan.in_llama_cpp(side):
                    counters.count_visual_tokens(running, plan.prompts.burst(repeat, plan.requests), outcomes)
                require_state(plan, state, running, outcomes, counted.prefix_hits, int(counted.media_hits))
                of: dict[str, Any] = {"side": side, "state": state, "repeat": repeat}
                runs.append(measure.burst_record(outcomes, duration, **of, slo=plan.slo, counters=counted))
    return runs, about


@contextlib.contextmanager
def _server(
    plan: BenchPlan, side: SideName, state: State, about: dict[SideName, About], progress: Progress
) -> Iterator[Server]:
    """The running, warmed-up server of a side, which it describes in `about`."""
    path, length, flags = plan.paths[side], plan.max_model_len, [*FLAGS[state], *ALWAYS, *plan.flags]
    progress(f"{state} {side}: starting the server", 0, 1)
    if llama_cpp := plan.in_llama_cpp(side):
        slots = int(plan.load.amount) if plan.load.kind == "closed" else MOST_SLOTS
        server = llamacpp_server.gguf_server(path, max_model_len=length, slots=min(slots, MOST_SLOTS))
    else:
        drafting = plan.speculative.get(side)
        server = vllm_server(path, flags=flags, images=plan.prompts.images, max_model_len=length, speculative=drafting)
    with server as running:
        # An unmeasured burst of images that are not used again, or, for warm runs, of the same images.
        number = plan.repeats if state == "cold" else 0
        outcomes, _ = burst(plan, side, running, number, f"{state} {side}: warming up", progress, None)
        _require_answers(outcomes, running)
        version = counters.server_version(running, llama_cpp)
        about[side] = About(
            version,
            [] if llama_cpp else flags,
            running.start_seconds,
            {} if llama_cpp else counters.cache_config(running),
        )
        yield running


def burst(
    plan: BenchPlan, side: SideName, running: Server, number: int, label: str, progress: Progress, repeat: int | None
) -> tuple[list[Outcome], float]:
    """Send one burst, encoded before the clock starts. Each repeat draws new arrivals of an open load; repeat None is a warm-up
    with eight clients."""
    messages = plan.prompts.burst(number, plan.requests)
    of_llama_cpp = plan.in_llama_cpp(side)
    bodies = [
        client.encode_request(running.name, conversation, plan.out_tokens, of_llama_cpp) for conversation in messages
    ]
    return client.send(
        running.url,
        bodies,
        Load("closed", 8) if repeat is None else plan.load,
        seed=plan.seed * 2**16 + (repeat or 0),
        timeout=plan.timeout,
        done=lambda count: progress(label, count, len(bodies)),
    )


def _require_answers(outcomes: Sequence[Outcome], running: Server) -> list[Outcome]:
    good = [outcome for outcome in outcomes if not outcome.error]
    if not good:
        raise UserError(
            f"{running.name} answered none of {len(outcomes)} requests, the first failed with "
            f"{outcomes[0].error}{last_words(running.log_path)}"
        )
    return good


def require_state(
    plan: BenchPlan, state: State, running: Server, outcomes: Sequence[Outcome], prefix_hits: float, media_hits: int
) -> None:
    """Check that a run matches its state: images processed, caches used or not, all tokens generated; else `UserError`."""
    good = _require_answers(outcomes, running)
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

"""Bursts of requests for both sides, against servers and offline, i.e. all at once to the engine without server and client.

The order is baseline, candidate, candidate, baseline, baseline, candidate, ... Machines drift (they warm up, other load comes
and goes). With A B B A a drift that is linear in time adds the same to both sides over two repeats, while A B A B favours one
of them. The two runs of a repeat are adjacent in time, so that drift hardly affects their ratio; adjacent turns of one side
need no restart of its engine.

**cold**: prefix cache and image processor cache off, and no image sent twice; the server's counters verify that nothing came
from a cache. With both off, vLLM also distinguishes equal images, so that its encoder cache is not used.
**warm**: caches on, and one burst repeated after a first, unmeasured time. Never compare cold with warm.

Two active engines disturb each other, so only one gets requests at a time. The other is stopped (a server is started for
every turn, which always fits into memory), or `resident`: running, but idle. On two CPU cores an idle vLLM 0.32 server took
0.8% of the machine; on a GPU both have to fit, see `--gpu-memory-utilization`.

Offline, `engines/vllm/worker.py` is the engine's process. A started engine answers a warm-up burst, then the bursts of its
turn, one engine at a time. The bursts are those of the cold server runs, so that different counts of prompt tokens reveal
different image processing. Flags for `vllm serve` have no effect here. `vllm bench
throughput --backend vllm-chat` times the same; but that tool takes no image files of one's own, and its `random-mm`
silently becomes plain text where no data set path is given.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from vlmcompress.engines import llamacpp_server
from vlmcompress.engines.local import last_words
from vlmcompress.engines.vllm import ENGINE as VLLM
from vlmcompress.engines.vllm import environment
from vlmcompress.engines.vllm.serve import Server, vllm_server
from vlmcompress.evaluation.results import LoadRun, State
from vlmcompress.evaluation.speed import client, counters, measure
from vlmcompress.evaluation.speed.client import Load, Outcome
from vlmcompress.evaluation.speed.prompts import Prompts
from vlmcompress.utils import json_files
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
SILENCE = 1800.0  # seconds within which the engine must start, then answer a burst
# Unlike for answers, the engine's core is a process of its own: requests are prepared while it works on others.
OFFLINE_ENGINE = replace(VLLM, name="vllm-offline", environment=lambda: environment(VLLM_LOGGING_LEVEL="WARNING"))


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
    resident: bool = False
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
    about: dict[SideName, About] = {"baseline": About(), "candidate": About()}
    with _servers(plan, state, about, progress) as side_server:
        for side, repeat in abba(plan.repeats):
            running = side_server(side)
            before = counters.counters(running)
            label = f"{state} {side} {repeat + 1}/{plan.repeats}"
            outcomes, duration = burst(plan, side, running, repeat if state == "cold" else 0, label, progress, repeat)
            counted = counters.counters(running).since(before)
            if plan.in_llama_cpp(side):
                counters.count_visual_tokens(running, plan.prompts.burst(repeat, plan.requests), outcomes)
            require_state(plan, state, running, outcomes, counted.prefix_hits, int(counted.media_hits))
            of: dict[str, Any] = {"side": side, "state": state, "repeat": repeat}
            runs.append(measure.burst_record(outcomes, duration, **of, slo=plan.slo, counters=counted))
    return runs, about


@contextlib.contextmanager
def _servers(
    plan: BenchPlan, state: State, about: dict[SideName, About], progress: Progress
) -> Iterator[Callable[[SideName], Server]]:
    """Yield a function that returns the running, warmed-up server of a side."""
    flags = [*FLAGS[state], *ALWAYS, *plan.flags]
    up: dict[SideName, Server] = {}
    with contextlib.ExitStack() as stack:

        def get(side: SideName) -> Server:
            if side not in up:
                if not plan.resident:
                    stack.close()
                    up.clear()
                progress(f"{state} {side}: starting the server", 0, 1)
                up[side] = running = stack.enter_context(_server(plan, side, flags))
                # An unmeasured burst of images that are not used again, or, for warm runs, of the same images.
                number = plan.repeats if state == "cold" else 0
                outcomes, _ = burst(plan, side, running, number, f"{state} {side}: warming up", progress, None)
                _require_answers(outcomes, running)
                if plan.in_llama_cpp(side):
                    about[side] = About(counters.server_version(running, llama_cpp=True), [], running.start_seconds)
                else:
                    cache = counters.cache_config(running)
                    about[side] = About(counters.server_version(running), flags, running.start_seconds, cache)
            return up[side]

        for side in plan.paths if plan.resident else ():  # all bursts have an idle second server
            get(side)
        yield get


def _server(plan: BenchPlan, side: SideName, flags: Sequence[str]) -> contextlib.AbstractContextManager[Server]:
    """The server of a side, as a context manager that starts it."""
    path, length = plan.paths[side], plan.max_model_len
    if plan.in_llama_cpp(side):
        slots = int(plan.load.amount) if plan.load.kind == "closed" else MOST_SLOTS
        return llamacpp_server.gguf_server(path, max_model_len=length, slots=min(slots, MOST_SLOTS))
    drafting = plan.speculative.get(side)
    return vllm_server(path, flags=flags, images=plan.prompts.images, max_model_len=length, speculative=drafting)


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


def run_offline(
    plan: BenchPlan, served: Sequence[LoadRun], progress: Progress
) -> tuple[list[LoadRun], dict[SideName, dict[str, Any]]]:
    """Run all bursts of both sides; return their records and each engine's description.

    Args:
        served: runs of the same plan against servers; visual tokens are taken from the cold ones.

    Raises:
        UserError: the engine can't start or dies, or a run did other work than the server's.
    """
    runs: list[LoadRun] = []
    about: dict[SideName, dict[str, Any]] = {"baseline": {}, "candidate": {}}
    for side, turns in groupby(abba(plan.repeats), key=lambda turn: turn[0]):
        repeats = [repeat for _, repeat in turns]
        label = f"offline {side} {', '.join(str(repeat + 1) for repeat in repeats)}/{plan.repeats}"
        progress(f"{label}: starting vLLM", 0, len(repeats))
        speculative = plan.speculative.get(side)
        quantization = json_files.read(plan.paths[side] / "config.json").get("quantization_config") or {}
        job = {
            "model": str(plan.paths[side].resolve()),
            "bursts": plan.out_tokens,
            "options": {
                "max_model_len": -1 if plan.max_model_len is None else plan.max_model_len,
                "seed": plan.seed,
                "kv_cache_dtype": "fp8" if quantization.get("kv_cache_scheme") else "auto",
                "limit_mm_per_prompt": {"image": plan.prompts.images, "video": 0, "audio": 0},
                "enable_prefix_caching": False,  # as in the server's cold runs
                "mm_processor_cache_gb": 0,
                "speculative_config": speculative and json.loads(speculative),
                "disable_log_stats": not speculative,  # `LLM.get_metrics` asserts that they are on
            },
        }
        bursts = [{"id": n, "messages": plan.prompts.burst(n, plan.requests)} for n in (plan.repeats, *repeats)]
        events = OFFLINE_ENGINE.events(job, bursts, plan.paths[side], SILENCE, SILENCE)
        with contextlib.closing(events):
            for event in events:
                if event["event"] == "ready":  # for cache and start-up the servers' figures are used
                    described = event["engine"].items()
                    about[side] = {k: v for k, v in described if k not in ("kv_cache_dtype", "start_seconds")}
                elif event["id"] != plan.repeats:
                    runs.append(_offline_run(plan, side, event, served))
                    progress(label, len(runs), 2 * plan.repeats)
    return runs, about


def _offline_run(plan: BenchPlan, side: SideName, event: dict[str, Any], served: Sequence[LoadRun]) -> LoadRun:
    """The record of one burst, after checking that it did the same work as the burst against a server."""
    (same,) = (r for r in served if (r.side, r.state, r.repeat) == (side, "cold", event["id"]))
    served_tokens = same.text_tokens + same.visual_tokens
    if not same.failed and event["prompt_tokens"] != served_tokens:
        raise UserError(
            f"{plan.paths[side]}: offline, prompts of burst {event['id']} have {event['prompt_tokens']} tokens, in the "
            f"server {served_tokens}; leave out flags that change how images are processed, or use --no-offline"
        )
    if event["cached_tokens"] or set(event["output_tokens"]) != {plan.out_tokens}:
        raise UserError(
            f"{plan.paths[side]}: offline answers have {min(event['output_tokens'])} to {max(event['output_tokens'])} of "
            f"{plan.out_tokens} tokens, {event['cached_tokens']} prompt tokens came from a cache; raise --max-model-len"
        )
    drafted: dict[str, Any] = {
        key: int(event["counted"].get(name, 0)) for name, key in counters.NAMES.items() if "spec_decode" in name
    }
    drafted["accepted_at"] = [
        int(count) for name, count in event["counted"].items() if name.startswith(counters.BY_PLACE)
    ]
    return LoadRun(
        side=side,
        mode="offline",
        state="cold",
        repeat=event["id"],
        duration=event["seconds"],
        completed=plan.requests,
        failed=0,
        text_tokens=event["prompt_tokens"] - same.visual_tokens,
        visual_tokens=same.visual_tokens,
        output_tokens=sum(event["output_tokens"]),
        **drafted,
    )

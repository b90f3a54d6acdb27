"""Bursts of requests for both sides, against one server at a time.

The order is baseline, candidate, candidate, baseline, baseline, candidate, ... Machines drift (they warm up, other load comes
and goes). With A B B A a drift that is linear in time adds the same to both sides over two repeats, while A B A B favours one
of them. The two runs of a repeat are adjacent in time, so that drift hardly affects their ratio; adjacent turns of one side
need no restart of its engine.

Prefix cache and image processor cache are off; the server's counters verify that nothing came from a cache. With both off,
vLLM also distinguishes equal images (`renderers/base.py: _process_mm_uuids`), so that its encoder cache is not used.

Two active engines disturb each other, so a server is started for every turn and the other side's is stopped.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from vlmcompress.engines import llamacpp_server
from vlmcompress.engines.local import last_words
from vlmcompress.engines.vllm import installed
from vlmcompress.engines.vllm.serve import Server, vllm_server
from vlmcompress.evaluation.results import LoadRun
from vlmcompress.evaluation.speed import client, counters, measure
from vlmcompress.evaluation.speed.client import Load, Outcome
from vlmcompress.evaluation.speed.counters import Counters
from vlmcompress.evaluation.speed.prompts import Prompts
from vlmcompress.reduction.block import takes_shares
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress

SideName = Literal["baseline", "candidate"]
Turn = tuple[SideName, int]

FLAGS = (
    "--no-enable-prefix-caching",
    "--mm-processor-cache-gb=0",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
)
"""Flags of `vllm serve` on both sides: no caches, visual tokens counted, no log line for each request."""
TIMEOUT = 600.0  # seconds of one request
MOST_SLOTS = 8  # maximum concurrent requests of llama.cpp's server, which otherwise equals the number of clients


@dataclass(frozen=True)
class BenchPlan:
    """Settings of a benchmark. A burst is all of `prompts`, with answers of `out_tokens` tokens; `flags`: of `vllm serve`.

    `speculative`: JSON of vLLM's `--speculative-config`, for each side.
    """

    paths: Mapping[SideName, Path]
    prompts: Prompts
    load: Load
    out_tokens: int
    repeats: int
    slo: Mapping[str, float]
    seed: int = 0
    max_model_len: int | None = None
    flags: Sequence[str] = ()
    speculative: Mapping[SideName, str | None] = field(default_factory=dict)

    def in_llama_cpp(self, side: SideName) -> bool:
        """Whether a side is GGUF, which llama.cpp serves."""
        return llamacpp_server.is_gguf(self.paths[side])


@dataclass(frozen=True)
class About:
    """The description of a side's last server. `cache`: vLLM's cache configuration, empty for llama.cpp."""

    version: str
    flags: list[str]
    start_seconds: float
    cache: dict[str, str]


def abba(repeats: int) -> list[Turn]:
    """`(side, repeat)` in the order of the runs; the two sides of a repeat are adjacent."""
    sides: tuple[SideName, SideName] = ("baseline", "candidate")
    return [(side, repeat) for repeat in range(repeats) for side in (sides if repeat % 2 == 0 else sides[::-1])]


def run_bursts(plan: BenchPlan, progress: Progress) -> tuple[list[LoadRun], dict[SideName, About]]:
    """Run all bursts.

    Raises:
        UserError: a server can't start or dies, no request is answered, or one is not answered in full or from a cache.
    """
    runs: list[LoadRun] = []
    about: dict[SideName, About] = {}
    for side, turns in groupby(abba(plan.repeats), key=lambda turn: turn[0]):
        with _server(plan, side, about, progress) as running:
            for _, repeat in turns:
                before = counters.counters(running)
                outcomes, duration = burst(plan, side, running, repeat, progress)
                counted = counters.counters(running).since(before)
                if plan.in_llama_cpp(side):
                    count_visual_tokens(plan, running, outcomes)
                require_work(plan, running, outcomes, counted)
                of: dict[str, Any] = {"side": side, "repeat": repeat, "slo": plan.slo}
                runs.append(measure.burst_record(outcomes, duration, **of, counters=counted))
    return runs, about


@contextlib.contextmanager
def _server(plan: BenchPlan, side: SideName, about: dict[SideName, About], progress: Progress) -> Iterator[Server]:
    """The running, warmed-up server of a side, which it describes in `about`."""
    path, length = plan.paths[side], plan.max_model_len
    progress(f"{side}: starting the server", 0, 1)
    if llama_cpp := plan.in_llama_cpp(side):
        flags, version = [], f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        slots = int(plan.load.amount) if plan.load.kind == "closed" else MOST_SLOTS
        server = llamacpp_server.gguf_server(path, max_model_len=length, slots=min(slots, MOST_SLOTS))
    else:
        flags, version = [*FLAGS, *plan.flags], installed().version
        drafting = plan.speculative.get(side)
        server = vllm_server(path, flags=flags, images=plan.prompts.images, max_model_len=length, speculative=drafting)
    with server as running:
        _require_answers(burst(plan, side, running, None, progress)[0], running)
        cache = {} if llama_cpp else counters.cache_config(running)
        about[side] = About(version, flags, running.start_seconds, cache)
        yield running


def burst(
    plan: BenchPlan, side: SideName, running: Server, repeat: int | None, progress: Progress
) -> tuple[list[Outcome], float]:
    """Send a burst, encoded before the clock starts. Each repeat draws new arrivals of an open load; None is the warm-up, with
    eight clients."""
    of_llama_cpp = plan.in_llama_cpp(side)
    takes = bool(plan.prompts.keep) and not of_llama_cpp and takes_shares(plan.paths[side])
    keep = plan.prompts.keep if takes else [None] * len(plan.prompts.conversations)
    bodies = [
        client.encode_request(running.name, messages, plan.out_tokens, llama_cpp=of_llama_cpp, keep=share)
        for messages, share in zip(plan.prompts.conversations, keep, strict=True)
    ]
    label = f"{side}: warming up" if repeat is None else f"{side} {repeat + 1}/{plan.repeats}"
    return client.send(
        running.url,
        bodies,
        Load("closed", 8) if repeat is None else plan.load,
        seed=plan.seed * 2**16 + (repeat or 0),
        timeout=TIMEOUT,
        done=lambda count: progress(label, count, len(bodies)),
    )


def count_visual_tokens(plan: BenchPlan, running: Server, outcomes: Sequence[Outcome]) -> None:
    """Set the visual tokens of a burst's outcomes, which llama.cpp does not report: the tokens of the prompt beyond those of
    the same conversation without images, which is asked now."""
    bodies = []
    for messages in plan.prompts.conversations:
        texts = [[part for part in turn["content"] if part["type"] == "text"] for turn in messages]
        without = [turn | {"content": text} for turn, text in zip(messages, texts, strict=True)]
        bodies.append(client.encode_request(running.name, without, 1, llama_cpp=True))
    of_text, _ = client.send(running.url, bodies, Load("closed", MOST_SLOTS), timeout=TIMEOUT)
    for outcome, text in zip(outcomes, of_text, strict=True):
        if outcome.prompt_tokens and text.prompt_tokens:
            outcome.visual_tokens = outcome.prompt_tokens - text.prompt_tokens


def _require_answers(outcomes: Sequence[Outcome], running: Server) -> list[Outcome]:
    good = [outcome for outcome in outcomes if not outcome.error]
    if not good:
        raise UserError(
            f"{running.name} answered none of {len(outcomes)} requests, the first failed with "
            f"{outcomes[0].error}{last_words(running.log_path)}"
        )
    return good


def require_work(plan: BenchPlan, running: Server, outcomes: Sequence[Outcome], counted: Counters) -> None:
    """Check that a burst did all its work: images processed, nothing from a cache, all tokens generated; else `UserError`."""
    good = _require_answers(outcomes, running)
    short = min(outcome.output_tokens for outcome in good)
    if short != plan.out_tokens:
        raise UserError(
            f"{running.name} stopped after {short} of {plan.out_tokens} tokens; lower --out-tokens or raise the "
            "context length with --max-model-len"
        )
    if not all(outcome.visual_tokens for outcome in good):
        raise UserError(f"{running.name} counts no visual tokens, so it did not process the images; is it a VLM?")
    if counted.prefix_hits or counted.media_hits:
        raise UserError(
            f"{running.name} took {counted.prefix_hits:g} tokens and {counted.media_hits:g} images from a cache; leave out "
            "flags that turn caches on"
        )

"""Peak throughput: all requests of a burst handed to the engine at once, without a server or a client.

`engines/vllm/offline.py` is the engine's process. An engine that was started answers a warm-up burst, then the bursts of
its turn; turns go in ABBA order, one engine at a time. The bursts are those of the cold server runs, so that different
counts of prompt tokens show that images were not processed alike. Flags for `vllm serve` have no effect here.

`vllm bench throughput --backend vllm-chat` times the same; but that tool takes no image files of one's own, and its
`random-mm` silently becomes plain text where no data set path is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from vlmcompress.bench import counters
from vlmcompress.bench.schedule import SideName, abba
from vlmcompress.bench.serving import Plan
from vlmcompress.common import json_files
from vlmcompress.common.progress import Progress
from vlmcompress.engines.vllm import environment, offline, runner
from vlmcompress.errors import UserError
from vlmcompress.results import LoadRun

SILENCE = 1800.0  # seconds in which the engine must be up, then answer a burst
# Unlike for answers, the engine's core is a process of its own: requests are prepared while it works on others.
ENGINE = replace(
    runner.ENGINE,
    name="vllm-offline",
    module=Path(offline.__file__),
    environment=lambda: environment(VLLM_LOGGING_LEVEL="WARNING"),
)


def run_offline(
    plan: Plan, served: Sequence[LoadRun], progress: Progress
) -> tuple[list[LoadRun], dict[SideName, dict[str, Any]]]:
    """Run all bursts of both sides; return their records and each engine's description of itself.

    Args:
        served: runs of the same plan against servers; visual tokens are taken from its cold ones.

    Raises:
        UserError: the engine can't start or dies, or a run is not the work of the server's.
    """
    runs: list[LoadRun] = []
    about: dict[SideName, dict[str, Any]] = {"baseline": {}, "candidate": {}}
    for side, turns in groupby(abba(plan.repeats), key=lambda turn: turn[0]):
        repeats = [repeat for _, repeat in turns]
        label = f"offline {side} {', '.join(str(repeat + 1) for repeat in repeats)}/{plan.repeats}"
        progress(f"{label}: starting vLLM", 0, len(repeats))
        bursts = [{"id": n, "messages": plan.prompts.burst(n, plan.requests)} for n in (plan.repeats, *repeats)]
        events = ENGINE.events(_job(plan, side), bursts, plan.paths[side], SILENCE, SILENCE)
        with contextlib.closing(events):
            for event in events:
                if event["event"] == "ready":
                    about[side] = event["engine"]
                elif event["id"] != plan.repeats:
                    runs.append(_run(plan, side, event, served))
                    progress(label, len(runs), 2 * plan.repeats)
    return runs, about


def _job(plan: Plan, side: SideName) -> dict[str, Any]:
    config = json_files.read(plan.paths[side] / "config.json")
    scaled = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    return {
        "model": str(plan.paths[side].resolve()),
        "max_model_len": -1 if plan.max_model_len is None else plan.max_model_len,
        "kv_cache_dtype": "fp8" if scaled else "auto",
        "images": plan.prompts.images,
        "out_tokens": plan.out_tokens,
        "seed": plan.seed,
        "speculative": plan.speculative.get(side),
    }


def _run(plan: Plan, side: SideName, event: dict[str, Any], served: Sequence[LoadRun]) -> LoadRun:
    """Make the record of one burst, after checking that it did the same work as that burst against a server."""
    (same,) = (r for r in served if (r.side, r.state, r.repeat) == (side, "cold", event["id"]))
    wanted = same.text_tokens + same.visual_tokens
    if not same.failed and event["prompt_tokens"] != wanted:
        raise UserError(
            f"{plan.paths[side]}: offline, prompts of burst {event['id']} have {event['prompt_tokens']} tokens, in the "
            f"server {wanted}; leave out flags that change how images are processed, or use --no-offline"
        )
    if event["cached_tokens"] or set(event["output_tokens"]) != {plan.out_tokens}:
        raise UserError(
            f"{plan.paths[side]}: offline answers have {min(event['output_tokens'])} to {max(event['output_tokens'])} of "
            f"{plan.out_tokens} tokens, {event['cached_tokens']} prompt tokens came from a cache; raise --max-model-len"
        )
    drafted: dict[str, Any] = {
        key: int(event["counted"].get(name, 0)) for name, key in counters.NAMES.items() if "spec_decode" in name
    }
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

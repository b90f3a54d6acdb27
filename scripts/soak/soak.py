#!/usr/bin/env python
"""Soak a checkpoint in vLLM's server: mixed requests by several clients, every answer checked.

scripts/soak/soak.py [MODEL] [--requests 3000] [--clients 8] [--data FILE] [--seed 0] [-- FLAGS OF vllm serve]

First a server without caches answers every conversation of the soak, one after the other: the reference. Then one with
prefix cache, image processor cache, chunked prefill that cuts images, and a KV space so small that requests are preempted
answers several clients, which repeat themselves, share images, stream, hang up early and send nonsense (`soaking/traffic.py`,
`soaking/malformed.py`). Wanted: no wrong answer (`soaking/verdict.py`), no status above 499, every malformed request refused,
nothing left running, memory flat. Exit code 1 if one of these fails. The last line is one JSON object.

Two faults are vLLM 0.32's own. Without a reducer a request that is preempted when its image came from the prefix cache may
end the server ("Encoder cache miss", see `engines/vllm/plugin/_resuming.py`). And one status 500 asks to be sent again: the
front end notes an image as sent before the engine has it, so after a client that hung up in between, the engine misses it.
Such requests are sent again, once; `lost_images` counts these cases in the server's log, and one that was sent again for
another reason is a failure.

A model that gives the encoder ever new lengths grows for long: oneDNN keeps what it compiled for up to 1,024 shapes, or for as
many as ONEDNN_PRIMITIVE_CACHE_CAPACITY says.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "measure"))  # `watching`, of the benchmarks of serving

from soaking import client, malformed, memory
from soaking.client import Reply, Sent
from soaking.traffic import MOST_IMAGES, Ask, Conversation, conversations, traffic
from soaking.verdict import MARGIN, TOP, judge
from transformers import AutoConfig

from vlmcompress.engines.vllm.serve import Server, server
from vlmcompress.evaluation.speed import counters
from vlmcompress.evaluation.speed.serving import FLAGS
from vlmcompress.models.data.sources import bundled, load_samples
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar

ROOT = Path(__file__).parents[2]
BLOCK = 32  # tokens of the KV cache
MALFORMED_EVERY = 15  # requests
LOST_IMAGE = "P0/P1 cache drift"  # vLLM 0.32's message for an image that its cache has lost
METRICS = (
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "mm_cache_hits_total",
    "num_requests_running",
    "num_requests_waiting",
)


def reference(model: str, talks: Sequence[Conversation], flags: Sequence[str], progress: ProgressBar) -> list[Reply]:
    """The answer of each conversation by a server without caches that works on one at a time."""
    replies = [Reply() for _ in talks]

    def body(conversation: Conversation, name: str) -> bytes:
        scores = {"logprobs": True, "top_logprobs": TOP, "return_tokens_as_token_ids": True}
        return json.dumps(conversation.body(name) | scores).encode()

    with server(model, flags=[*FLAGS["cold"], "--max-num-seqs", "1", *flags], images=MOST_IMAGES) as running:
        sent = [Sent(lambda each=each: body(each, running.name)) for each in talks]

        def done(index: int, reply: Reply) -> None:
            replies[index] = reply
            progress("reference", index + 1, len(talks))

        client.send(running.url, sent, 1, done)
    for conversation, reply in zip(talks, replies, strict=True):
        if reply.status != 200:
            raise UserError(f"the reference could not answer ({conversation.kind}): HTTP {reply.status} {reply.error}")
    return replies


def pressure(model: str, replies: Sequence[Reply], clients: int) -> list[str]:
    """Choose flags that make the server work hard: caches that must evict, chunks that cut images, KV space for about
    half of the clients' requests at once."""
    longest = AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
    held = [reply.prompt_tokens + len(reply.choices[0].tokens) for reply in replies]
    blocks = max(2 * math.ceil(max(held) / BLOCK), math.ceil(clients / 2 * sum(held) / len(held) / BLOCK))
    return [
        "--enable-prefix-caching",
        *("--mm-processor-cache-gb", "0.03"),
        *("--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", str(blocks)),
        *("--max-model-len", str(min((blocks - 1) * BLOCK, longest))),  # vLLM sets one block aside
        *("--max-num-batched-tokens", "96"),
        *("--max-num-seqs", str(clients)),
    ]


class Soak:
    """One soak: the requests that are sent, and the books about the replies."""

    def __init__(
        self, asks: Sequence[Ask], talks: Sequence[Conversation], right: Sequence[Reply], name: str, seed: int
    ):
        self.right, self.name = right, name
        self.plan: list[Ask | str] = list(asks)  # a string: what is wrong with a malformed request
        nonsense = malformed.bodies(name)
        draw, kinds = random.Random(seed), list(nonsense)
        for at in range(len(self.plan), 0, -MALFORMED_EVERY):
            self.plan.insert(draw.randint(0, at), kinds[(at // MALFORMED_EVERY) % len(kinds)])
        self.sent = [
            Sent(lambda entry=entry: nonsense[entry], again=False)
            if isinstance(entry, str)
            else Sent(
                lambda entry=entry: json.dumps(entry.body(talks[entry.number], name)).encode(),
                entry.patience if entry.delivery == "aborted" else None,
            )
            for entry in self.plan
        ]
        self.asked = talks
        self.finished = 0
        self.answers: dict[str, Counter[str]] = {}
        self.refused: dict[str, Counter[int]] = {}
        self.problems: list[str] = []
        self.deviation = 0.0
        self.again = 0

    def book(self, index: int, reply: Reply) -> None:
        """Judge a reply."""
        self.finished += 1
        self.again += bool(reply.first_error)
        entry = self.plan[index]
        if isinstance(entry, str):
            self.refused.setdefault(entry, Counter())[reply.status] += 1
            if not 400 <= reply.status < (501 if entry in malformed.UNCAUGHT else 500):
                self.problems.append(f"{entry}: HTTP {reply.status} {reply.error}")
            return
        count = self.answers.setdefault(entry.delivery, Counter())
        if reply.status != 200:
            count["error"] += 1
            self.problems.append(f"conversation {entry.number}, {entry.delivery}: HTTP {reply.status} {reply.error}")
            return
        verdict = judge(reply, self.right[entry.number], MARGIN)
        count[verdict.answer] += 1
        self.deviation = max(self.deviation, verdict.deviation)
        if verdict.answer == "wrong":
            kind = self.asked[entry.number].kind
            self.problems.append(f"conversation {entry.number} ({kind}), {entry.delivery}: {verdict.why}")


def soak(soaked: Soak, running: Server, clients: int, progress: ProgressBar) -> dict[str, Any]:
    """Send everything; what the server and its memory did."""

    def done(index: int, reply: Reply) -> None:
        soaked.book(index, reply)
        progress("soak", soaked.finished, len(soaked.sent))

    began = time.monotonic()
    with memory.watch(running.pid, lambda: soaked.finished) as samples:
        client.send(running.url, soaked.sent, clients, done)
        seconds = time.monotonic() - began
    after = idle(running)
    if busy := {name: after[name] for name in ("num_requests_running", "num_requests_waiting") if after[name]}:
        soaked.problems.append(f"the server still has {busy} when every client has left")
    lost = running.log_path.read_text(encoding="utf-8", errors="replace").count(LOST_IMAGE)
    if soaked.again > lost:
        soaked.problems.append(f"{soaked.again} requests were sent again, {lost} of them because of a lost image")
    growth = memory.growth_mb(samples, len(soaked.sent))
    if not memory.flat(samples, len(soaked.sent)):
        soaked.problems.append(f"memory grew by {growth:.0f} MB over the second half")
    return {
        "seconds": round(seconds),
        "sent_again": soaked.again,
        "lost_images": lost,
        "server": {name: round(value) for name, value in after.items()},
        "memory_mb": [samples[round(share * (len(samples) - 1))] for share in (0, 0.1, 0.25, 0.5, 0.75, 1)],
        "memory_growth_mb": growth and round(growth, 1),
    }


def idle(running: Server, patience: float = 30.0) -> dict[str, float]:
    """Read the server's metrics, once it has noticed that its clients left."""
    end = time.monotonic() + patience
    while True:
        after = dict.fromkeys(METRICS, 0.0)
        for name, _, value in counters.metrics(running):
            if (short := name.removeprefix("vllm:")) in after:
                after[short] += float(value)
        if not after["num_requests_running"] + after["num_requests_waiting"] or time.monotonic() > end:
            return after
        time.sleep(1)


def report(options: argparse.Namespace, soaked: Soak, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Collect all figures of a soak."""
    total = sum(soaked.answers.values(), Counter())
    return {
        "model": Path(options.model).name,
        "requests": len(soaked.sent),
        "conversations": len(soaked.asked),
        "kinds": dict(Counter(each.kind for each in soaked.asked)),
        "clients": options.clients,
        **{answer: total[answer] for answer in ("equal", "tie", "wrong", "unseen", "error")},
        "answers": {delivery: dict(count) for delivery, count in sorted(soaked.answers.items())},
        "malformed": {what: dict(count) for what, count in sorted(soaked.refused.items())},
        "largest_deviation": round(soaked.deviation, 4),
        **figures,
        "problems": len(soaked.problems),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "eval/demo/demo-llava"))
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--data", help="questions about images; default: the ones bundled with the model or demo-llava")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep the log of the soaked server here")
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, flags = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    if min(options.requests, options.clients) < 1:
        parser.error("--requests and --clients must be at least 1")
    data = options.data or bundled(options.model, "test") or bundled(ROOT / "eval/demo/demo-llava", "test")
    samples = load_samples(data, samples=None, seed=options.seed, check_images=False)
    asks = traffic(options.requests, options.seed)
    talks = conversations(samples, 1 + max(ask.number for ask in asks), options.seed)
    progress = ProgressBar()
    right = reference(options.model, talks, flags, progress)
    hard = [*pressure(options.model, right, options.clients), *flags]
    with server(options.model, flags=hard, images=MOST_IMAGES, log=options.log) as running:
        soaked = Soak(asks, talks, right, running.name, options.seed)
        figures = soak(soaked, running, options.clients, progress)
    progress.close()
    for problem in soaked.problems[:50]:
        print(problem, file=sys.stderr)
    print(json.dumps(report(options, soaked, figures | {"flags": hard})))
    return 1 if soaked.problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")

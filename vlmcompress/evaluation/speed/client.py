"""Loads, and a streaming client that measures them, for OpenAI-compatible chat servers.

Loads and percentiles are those of `vllm bench serve` in vLLM 0.32, which is not used as it drops the server's counts of visual
tokens, so that it can't show that images were processed; takes the stream's first, empty chunk (the role) for the first token
and every chunk for one token; encodes each image while the clock runs, in the loop that reads the other streams; and imports
vLLM for every burst. For the same requests, both agree on end-to-end times and requests per second if the machine has enough
cores for client and server.

A closed load is N clients, each of which sends its next request when its last one is answered: it shows capacity at a given
concurrency. An open load is a Poisson process of R requests a second, whatever the server does: it shows the latency of a
service, queueing included.

Definitions, with times in seconds from the moment at which a request is due (closed load: sent; open load: scheduled, so
that a client that lags behind does not hide the server's queue):

- TTFT: until the first chunk that brings a token. E2E: until the last one.
- ITL: the time between two chunks with tokens; a chunk of k tokens counts as k gaps of a k-th each.
- TPOT: (E2E - TTFT) / (tokens - 1) of a request.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmcompress.utils.errors import UserError, did_you_mean

KINDS = ("closed", "rate")
MOST = 10_000  # clients, or requests per second


@dataclass(frozen=True)
class Load:
    """A load. Kind `closed`: `amount` clients; kind `rate`: `amount` requests per second."""

    kind: Literal["closed", "rate"]
    amount: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.amount:g}"

    @property
    def default_requests(self) -> int:
        """Default number of requests, mostly in the steady state: 16 rounds of all clients, or a minute."""
        return max(64, math.ceil(self.amount * (16 if self.kind == "closed" else 60)))

    def arrivals(self, requests: int, seed: int) -> list[float] | None:
        """The random arrival times of an open load's requests, in ascending seconds from the start; None for a closed load.

        Gaps are exponential with mean 1 / rate. Unlike vLLM's benchmark, the last arrival is not moved to requests / rate:
        both sides get the same arrivals, so there is no variance between them to remove.
        """
        if self.kind == "closed":
            return None
        draw, now, times = random.Random(seed), 0.0, []
        for _ in range(requests):
            now += draw.expovariate(self.amount)
            times.append(now)
        return times


def parse_load(text: str) -> Load:
    """Parse a load like `closed:8` or `rate:2.5`.

    Raises:
        UserError: another kind, or the number is not above zero (for clients: not whole).
    """
    kind, colon, number = text.partition(":")
    if kind not in KINDS:
        raise UserError(f"--load {text}: no load '{kind}'{did_you_mean(kind, KINDS)}; e.g. closed:8 or rate:2.5")
    what = "a whole number of clients" if kind == "closed" else "requests per second"
    try:
        amount = int(number) if kind == "closed" else float(number)
    except ValueError:
        amount = 0
    if not colon or not 0 < amount <= MOST:
        raise UserError(
            f"--load {text[:60]}: '{number[:40]}' should be {what} above 0 and at most {MOST:,}; e.g. closed:8 or rate:2.5"
        )
    return Load("closed" if kind == "closed" else "rate", amount)


@dataclass
class Outcome:
    """One request as observed by its client.

    Attributes:
        ttft, e2e: seconds; see the module. `itl`: seconds between tokens.
        error: the reason why the request failed, or "".
        prompt_tokens, visual_tokens, output_tokens: counts by the server; prompt tokens include visual ones.
    """

    ttft: float = 0.0
    e2e: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    visual_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def encode_request(
    model: str, messages: list[dict[str, Any]], out_tokens: int, *, llama_cpp: bool = False, keep: float | None = None
) -> bytes:
    """Encode the body of a request for exactly `out_tokens` greedy tokens, streamed with running usage, which has another name
    in llama.cpp. `keep`: the share of visual tokens that the reducer keeps; None: its own."""
    body = {
        "model": model,
        "messages": messages,
        "max_completion_tokens": out_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    body |= {"timings_per_token": True} if llama_cpp else {}
    return json.dumps(body | ({} if keep is None else {"mm_processor_kwargs": {"keep": keep}})).encode()


def send(
    url: str,
    bodies: Sequence[bytes],
    load: Load,
    *,
    seed: int = 0,
    timeout: float = 600.0,
    done: Callable[[int], None] = lambda _: None,
) -> tuple[list[Outcome], float]:
    """Send all requests with the given load and wait for all answers.

    Args:
        url: URL of the server, without a path.
        seed: seed of the arrival times of an open load.
        timeout: seconds that one request may take.
        done: called with the number of finished requests.

    Returns:
        An outcome for each body, in order, and the seconds from the start until the last answer.
    """
    import aiohttp  # vLLM's own client uses it, so it is in every environment that has vLLM

    async def send_all() -> tuple[list[Outcome], float]:
        outcomes = [Outcome() for _ in bodies]
        finished = 0
        # llama.cpp's server closes a connection after a streamed answer, vLLM's an idle one after 5 s, both without notice.
        connections = aiohttp.TCPConnector(limit=0, force_close=True)
        limits = aiohttp.ClientTimeout(total=timeout)
        async with aiohttp.ClientSession(f"{url}/", timeout=limits, connector=connections) as session:
            start = time.perf_counter()

            async def send_one(index: int, due: float) -> None:
                nonlocal finished
                await _stream(session, bodies[index], due, outcomes[index])
                finished += 1
                done(finished)

            async def client(waiting: Iterator[int]) -> None:
                for index in waiting:
                    await send_one(index, time.perf_counter())

            # Due at its arrival, not when it is sent: a client that lags would hide the server's queue (coordinated omission).
            async def arrive(index: int, offset: float) -> None:
                await asyncio.sleep(start + offset - time.perf_counter())
                await send_one(index, start + offset)

            if (arrivals := load.arrivals(len(bodies), seed)) is None:
                waiting = iter(range(len(bodies)))  # shared by all clients
                await asyncio.gather(*(client(waiting) for _ in range(int(load.amount))))
            else:
                await asyncio.gather(*(arrive(index, offset) for index, offset in enumerate(arrivals)))
            return outcomes, time.perf_counter() - start

    return asyncio.run(send_all())


async def _stream(session: Any, body: bytes, due: float, outcome: Outcome) -> None:
    """Send one request and fill in its outcome."""
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post("v1/chat/completions", data=body, headers=headers) as reply:
            if reply.status != 200:
                outcome.error = f"HTTP {reply.status}: {(await reply.text())[:300]}"
                return
            last = due
            async for line in reply.content:
                now = time.perf_counter()
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    outcome.error = str(chunk["error"])[:300]
                    return
                usage = chunk.get("usage") or {"completion_tokens": (chunk.get("timings") or {}).get("predicted_n")}
                last = _count(outcome, usage, now, due, last)
        outcome.error = "" if outcome.output_tokens else "the stream had no tokens"
    except Exception as error:  # any failure of one request is its outcome; the load continues
        outcome.error = f"{type(error).__name__}: {error}"


def _count(outcome: Outcome, usage: dict[str, Any], now: float, due: float, last: float) -> float:
    """Record the new tokens of a chunk that arrived at `now`, and return the time of the last token so far."""
    details = usage.get("prompt_tokens_details") or {}
    if details:  # only in the final chunk
        outcome.visual_tokens = sum((details.get("multimodal_tokens") or {}).values())
    outcome.prompt_tokens = usage.get("prompt_tokens") or outcome.prompt_tokens
    new = (usage.get("completion_tokens") or 0) - outcome.output_tokens
    if new <= 0:
        return last
    if outcome.output_tokens:
        # A chunk of several tokens (speculation, a busy server) shows one arrival: its gap is shared evenly.
        outcome.itl += [(now - last) / new] * new
    else:
        outcome.ttft = now - due
    outcome.output_tokens += new
    outcome.e2e = now - due
    return now

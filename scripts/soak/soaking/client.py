"""Send requests to an OpenAI-compatible server and keep the token ids and log-probabilities of the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 300.0  # seconds of one request


@dataclass
class Choice:
    """One answer. `finish`: the reason why it ended, "" if it did not. `scores`: log-probabilities of its tokens, where
    asked for; `best`: the most likely tokens at each place with their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    scores: list[float] = field(default_factory=list)
    best: list[dict[int, float]] = field(default_factory=list)


@dataclass
class Reply:
    """The reply to a request. `status` 0: no answer at all, `error` says why. `left`: the client hung up.
    `first_error`: the reason why it was sent a second time."""

    status: int = 0
    error: str = ""
    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: int = 0
    left: bool = False
    first_error: str = ""


@dataclass(frozen=True)
class Sent:
    """A request.

    Attributes:
        body: function that makes its bytes.
        patience: number of chunks of a stream after which the client hangs up; None: it doesn't.
        again: send it once more if it fails with a status from 500, as OpenAI's client does.
    """

    body: Callable[[], bytes]
    patience: int | None = None
    again: bool = True


def send(url: str, requests: Sequence[Sent], clients: int, done: Callable[[int, Reply], None]) -> None:
    """Send all requests, in order, `clients` at a time; `done(index, reply)` takes each reply as it comes."""
    asyncio.run(_send(url, requests, clients, done))


async def _send(url: str, requests: Sequence[Sent], clients: int, done: Callable[[int, Reply], None]) -> None:
    import aiohttp  # in every environment that has vLLM

    waiting = iter(enumerate(requests))
    connections = aiohttp.TCPConnector(limit=0, force_close=True)  # a status 500 makes the server drop connections
    limit = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(f"{url}/", timeout=limit, connector=connections) as session:

        async def client() -> None:
            for index, request in waiting:
                reply = await _reply(session, request)
                if request.again and reply.status >= 500:
                    first_error = reply.error
                    reply = await _reply(session, request)
                    reply.first_error = first_error
                done(index, reply)

        await asyncio.gather(*(client() for _ in range(clients)))


async def _reply(session: Any, request: Sent) -> Reply:
    reply = Reply()
    try:
        await _ask(session, request, reply)
    except Exception as error:  # whatever happens to one request is its reply, the others go on
        reply.status, reply.error = 0, f"{type(error).__name__}: {error}"
    return reply


async def _ask(session: Any, request: Sent, reply: Reply) -> None:
    if request.patience == 0:
        await _leave_early(session, request.body(), reply)
        return
    headers = {"Content-Type": "application/json"}
    async with session.post("v1/chat/completions", data=request.body(), headers=headers) as answer:
        reply.status = answer.status
        if answer.status != 200:
            reply.error = " ".join((await answer.text()).split())[:300]
        elif answer.content_type == "text/event-stream":
            await _stream(answer, request.patience, reply)
        else:
            read(await answer.json(), reply)


async def _leave_early(session: Any, body: bytes, reply: Reply) -> None:
    """Hang up before the server has said anything, in most cases while it works on the request."""
    headers = {"Content-Type": "application/json"}
    task = asyncio.ensure_future(session.post("v1/chat/completions", data=body, headers=headers))
    await asyncio.wait((task,), timeout=0.05)
    reply.status, reply.left = 200, True
    if task.cancel():
        await asyncio.gather(task, return_exceptions=True)
    else:
        answer = task.result()
        reply.status = answer.status
        answer.close()


async def _stream(answer: Any, patience: int | None, reply: Reply) -> None:
    chunks = 0
    async for line in answer.content:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            reply.status, reply.error = int(chunk["error"].get("code") or 500), str(chunk["error"])[:300]
            return
        read(chunk, reply)
        chunks += 1
        if chunks == patience:
            reply.left = True
            answer.close()
            return


def read(body: dict[str, Any], reply: Reply) -> None:
    """Book an answer, or one chunk of a stream."""
    reply.prompt_tokens = (body.get("usage") or {}).get("prompt_tokens") or reply.prompt_tokens
    for entry in body.get("choices") or ():
        while len(reply.choices) <= entry["index"]:
            reply.choices.append(Choice())
        choice = reply.choices[entry["index"]]
        choice.tokens += entry.get("token_ids") or ()
        choice.finish = entry.get("finish_reason") or choice.finish
        for token in (entry.get("logprobs") or {}).get("content") or ():
            choice.scores.append(token["logprob"])
            choice.best.append({_identity(top): top["logprob"] for top in token["top_logprobs"]})


def _identity(top: dict[str, Any]) -> int:
    return int(top["token"].removeprefix("token_id:"))

"""Get answers from a running server, over OpenAI's chat completions interface.

Requests ask for greedy decoding, but a server's own settings still apply: vLLM uses a repetition penalty from the checkpoint's
generation config unless it is started with `--generation-config vllm`. The key, if needed, is in `OPENAI_API_KEY`. The client
retries server errors, timeouts and lost connections, with growing pauses.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import mimetypes
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from vlmcompress.engines import Answer, Engine, Job, Refusals, Request, Run, first_tokens, media_file
from vlmcompress.models.data.video import FRAMES_FILE
from vlmcompress.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from openai import AsyncOpenAI

IN_FLIGHT = 8  # default number of concurrent requests
RETRIES = 4
CONNECT_TIMEOUT = 10.0  # seconds
REFUSED = (400, 413, 415, 422, 500)  # HTTP codes that count as refusals of single requests, unless all get them


@dataclass(frozen=True)
class OpenAI(Engine):
    """The server at `url`, which ends in a version such as /v1. Images and videos are sent as data: URLs."""

    url: str
    local: bool = False

    @classmethod
    def at(cls, address: str) -> OpenAI:
        """Make the engine for a server's address; `/v1` may be left out."""
        import httpx

        try:
            parts = httpx.URL(address)  # as the client reads it
            port = 80 if parts.port is None else parts.port
            valid = parts.scheme in ("http", "https") and bool(parts.host) and 0 < port < 65536
        except (httpx.InvalidURL, ValueError):
            valid = False
        if not valid or any(character.isspace() for character in address):
            raise UserError(f"'{address}' is not the address of a server; write openai:http://localhost:8000")
        return cls(address.rstrip("/") + ("" if parts.path.strip("/") else "/v1"))

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"openai:{self.url}"

    def _answer(self, job: Job) -> Run:
        answers: dict[str, Answer] = {}
        model = str(job.model)
        job.progress(job.label, 0, len(job.requests))

        async def ask() -> float:
            try:
                import openai
            except ImportError as error:
                raise UserError(
                    "openai is not installed; pip install '.[eval]' in the checkout of vlmcompress"
                ) from error
            host = urlparse(self.url).hostname or ""
            this_machine = host in ("localhost", "::1") or host.startswith("127.")  # no proxy for this machine
            async with openai.AsyncOpenAI(
                base_url=self.url,
                api_key=os.environ.get("OPENAI_API_KEY") or "none",
                timeout=openai.Timeout(job.settings.answer_timeout, connect=CONNECT_TIMEOUT),
                max_retries=RETRIES,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=not this_machine),
            ) as client:
                await self._require_model(client, model)
                began = time.monotonic()
                refusals = Refusals(f"{model} at {self.url}", job.settings.refusals)
                session = _Session(client, self.url, job, refusals)
                async for answer in session.answers(job.requests):
                    answers[answer.id] = answer
                    job.on_answer(answer)
                    job.progress(job.label, len(answers), len(job.requests))
                return time.monotonic() - began

        seconds = asyncio.run(ask())
        return Run(answers, {"name": "openai", "url": self.url, "model": model, "restarts": 0}, round(seconds, 2))

    async def _require_model(self, client: AsyncOpenAI, model: str) -> None:
        """Raise `UserError` if the server is down or does not list the model."""
        import openai

        try:
            raw = await client.models.with_raw_response.list()
            served = [entry["id"] for entry in json.loads(raw.text)["data"]]
        except openai.NotFoundError:  # some servers do not list models
            return
        except openai.APIStatusError as error:
            raise UserError(f"{self.url}/models: {_status(error)}") from error
        except openai.APIConnectionError as error:
            raise UserError(f"no server answers at {self.url} ({_reason(error)}); is it up?") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.url}/models is no list of models; is this an OpenAI-compatible server?") from error
        if model not in served:
            raise UserError(f"{self.url} does not serve '{model}'{did_you_mean(model, served)}")


@dataclass(frozen=True)
class _Session:
    client: AsyncOpenAI
    url: str
    job: Job
    refusals: Refusals

    async def answers(self, requests: Sequence[Request]) -> AsyncIterator[Answer]:
        """Yield answers as they arrive; the first error cancels all open requests."""
        limit = asyncio.Semaphore(self.job.settings.max_num_seqs or IN_FLIGHT)

        async def in_turn(request: Request) -> Answer:
            async with limit:
                return await self._answer(request)

        tasks = [asyncio.create_task(in_turn(request)) for request in requests]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for pending in tasks:
                pending.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: Request) -> Answer:
        import openai

        options: dict[str, Any] = {"max_tokens": request.max_tokens or self.job.settings.max_tokens, "temperature": 0.0}
        if self.job.settings.logprobs:
            options |= {"logprobs": True, "top_logprobs": self.job.settings.logprobs}
        if request.keep is not None:
            options["extra_body"] = {"mm_processor_kwargs": {"keep": request.keep}}
        sample = f"sample '{request.id}'"
        messages: Any = copy.deepcopy(request.messages)
        for part in Request(request.id, messages).media():  # images and videos as data: addresses
            try:
                path = media_file(part[part["type"]]["url"], self.job.media)
                frames = path.suffix == FRAMES_FILE
                encoded = path.read_text() if frames else base64.b64encode(path.read_bytes()).decode()
            except ValueError as error:
                raise UserError(f"{sample}: {error}") from error
            except OSError as error:
                raise UserError(f"{sample}: {path} can't be read ({error.strerror})") from error
            kind = "video/jpeg" if frames else mimetypes.guess_type(path.name)[0] or "image/png"
            part[part["type"]] = {"url": f"data:{kind};base64,{encoded}"}
        try:
            raw = await self.client.chat.completions.with_raw_response.create(
                model=str(self.job.model), messages=messages, **options
            )
        except openai.APITimeoutError as error:
            limit = self.job.settings.answer_timeout
            raise UserError(f"{self.url} gave no answer to {sample} for {limit:g} s, {RETRIES + 1} times") from error
        except openai.APIConnectionError as error:
            raise UserError(f"{self.url} can't be reached any more, at {sample} ({_reason(error)})") from error
        except openai.APIStatusError as error:
            if error.status_code in REFUSED:
                return self.refusals.add(request.id, _status(error))
            raise UserError(
                f"{sample} can't be answered by {self.job.model} at {self.url}: {_status(error)}"
            ) from error
        try:
            return replace(_parse(json.loads(raw.text)), id=request.id)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            body = " ".join(raw.text.split())[:200]
            raise UserError(f"{self.url} gave no chat completion for {sample} but: {body or 'nothing'}") from error


def _parse(body: Any) -> Answer:
    """Read the answer from a chat completion, without an id. Raises what indexing raises for anything else."""
    choice = body["choices"][0]
    text, usage = choice["message"].get("content"), body.get("usage") or {}
    if text is None:  # of a refusal, of a tool call, or where all tokens went into what a reasoning parser takes off
        text = ""
    if not isinstance(text, str):
        raise TypeError("no text")
    tokens = (choice.get("logprobs") or {}).get("content") or []
    return Answer(
        id="",
        text=text,
        finish=choice.get("finish_reason") or "",
        prompt_tokens=usage.get("prompt_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or 0,
        first=first_tokens((top["token"], top["logprob"]) for top in tokens[0]["top_logprobs"]) if tokens else None,
    )


def _status(error: Any) -> str:
    """Write an HTTP error in one line: its code and at most 200 characters of the server's message."""
    body = error.body if isinstance(error.body, dict) else {}
    said = body.get("message") or error.response.text
    hint = "; set OPENAI_API_KEY" if error.status_code in (401, 403) else ""
    return f"HTTP {error.status_code}: {' '.join(str(said).split())[:200]}{hint}"


def _reason(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split()) or type(error).__name__

"""Inference engines: `get("vllm")`, `get("hf")` or `get("openai:http://localhost:8000")` answers requests.

An engine takes requests in OpenAI's chat format and returns greedy answers and a description of its run. Local engines run in
separate processes, so the compressor's environment and the engine's may differ.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.progress import Progress, silent
from vlmcompress.utils.schema import Count, LogProbability

NAMES = ("vllm", "hf", "llamacpp", "openvino", "mlx", "openai:URL")
MEDIA = ("image_url", "video_url")
"""Types of content parts with a file, whose address is `part[type]["url"]`."""


@dataclass(frozen=True)
class Request:
    """One conversation in OpenAI's format; images are `{"type": "image_url", "image_url": {"url": "file:///..."}}`, and videos
    `video_url`, as in vLLM.

    `max_tokens` is the most tokens of the answer; None: `Settings.max_tokens`. `keep`: the share, or number, of its images'
    tokens that the reducer keeps; None: the checkpoint's.
    """

    id: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    keep: Any = None

    def media(self) -> list[dict[str, Any]]:
        """The parts with a file, in order; references into the request, not copies."""
        contents = [message["content"] for message in self.messages if isinstance(message["content"], list)]
        return [part for content in contents for part in content if part["type"] in MEDIA]

    def images(self) -> int:
        return sum(part["type"] == "image_url" for part in self.media())

    def videos(self) -> int:
        return sum(part["type"] == "video_url" for part in self.media())


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a run of an engine.

    Attributes:
        max_tokens: most tokens of an answer.
        max_model_len: context length; -1: the model's own, or what fits into memory if that is less.
        max_num_seqs: sequences in flight; 0: the engine's choice (vLLM: 32 on a CPU, 256 on a GPU).
        logprobs: report this many of the most likely first tokens with their log-probabilities.
        start_timeout: seconds within which the model must be loaded.
        answer_timeout: seconds within which the next answer must arrive.
        refusals: the most requests that the engine may refuse (see `Answer.refused`); one more ends the run.
    """

    max_tokens: int = 32
    max_model_len: int = -1
    max_num_seqs: int = 0
    dtype: str = "auto"
    seed: int = 0
    logprobs: int = 0
    start_timeout: float = 1800.0
    answer_timeout: float = 900.0
    refusals: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer of the model. `finish` is `stop`, or `length` when `max_tokens` cut it off.

    `first` maps the text of the most likely first tokens to their log-probabilities (natural, of the whole vocabulary);
    None if not requested. `prompt_tokens` is the number of tokens that the language model got, `visual_tokens` the number of
    image tokens among them, if the engine reports it. Tokens with equal text are one entry with the sum of their
    probabilities. `refused` is the reason if the model or the engine raised for the request; then the text is empty.
    """

    id: str
    text: str
    finish: str
    prompt_tokens: Count
    output_tokens: Count
    first: dict[str, LogProbability] | None = None
    visual_tokens: Count | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Run:
    """All answers by request id, the engine's description of itself, and the seconds it took, without its start.

    `engine["restarts"]` is the number of restarts after crashes.
    """

    answers: dict[str, Answer]
    engine: dict[str, Any]
    seconds: float


@dataclass
class Refusals:
    """Counts the requests that an engine refuses. `model`: the model's name in messages; `allowed`: the most refusals."""

    model: str
    allowed: int
    count: int = 0

    def add(self, identity: str, why: str) -> Answer:
        """Record a refusal and return its `Answer`. Raises `UserError` if there are more than allowed."""
        self.count += 1
        if self.count > self.allowed:
            others = f"{self.count - 1} other{'s' * (self.count > 2)}"
            many = f"; so it is with {others}, too many to leave them out" if self.allowed else ""
            raise UserError(f"sample '{identity}' can't be answered by {self.model}: {why}{many}")
        return Answer(identity, "", "refused", 0, 0, refused=why)


def first_tokens(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Make `Answer.first` of token texts and log-probabilities: most likely first, probabilities of equal texts added."""
    logprobs: dict[str, float] = {}
    for text, logprob in pairs:
        low, high = sorted((logprobs.get(text, -math.inf), logprob))
        logprobs[text] = high + (math.log1p(math.exp(low - high)) if low > -math.inf else 0.0)
    return dict(sorted(logprobs.items(), key=lambda pair: -pair[1]))


@dataclass(frozen=True)
class Job:
    """One call of an engine.

    Attributes:
        model: checkpoint folder, or the model's name on a server.
        media: the folder with the requests' images; the engine may read no other.
        label: name of this run in `progress(label, answered, total)` and in messages.
        on_answer: called with each answer as it arrives, before the call returns.
    """

    model: str | Path
    requests: Sequence[Request]
    media: Path
    settings: EngineSettings = EngineSettings()
    label: str = "answering"
    progress: Progress = silent
    on_answer: Callable[[Answer], None] = lambda answer: None


class Engine:
    """An engine that answers requests. `local`: whether models are checkpoint folders; else names that a server knows."""

    name: str
    local: bool

    def answer(self, model: str | Path, requests: Sequence[Request], *, media: str | Path, **options: Any) -> Run:
        """Answer all requests greedily. `options`: further fields of `Job`; None: its default.

        Raises:
            UserError: the engine can't start, fails, stalls, or refuses more requests than the settings allow.
        """
        fields = {name: value for name, value in options.items() if value is not None}
        return self._answer(Job(model, requests, Path(media), **fields))

    def _answer(self, job: Job) -> Run:
        """Answer a job; each engine implements this for `answer`."""
        raise NotImplementedError


def media_file(address: str, media: Path) -> Path:
    """The file of a `file:` address in the folder `media`. Raises ValueError if it is elsewhere, as engines may not read
    it."""
    path = Path(unquote(urlparse(address).path)).resolve()
    if not address.startswith("file://") or not path.is_relative_to(media.resolve()):
        raise ValueError(f"{address[:80]} is not a file in {media}")
    return path


def get_engine(spec: str) -> Engine:
    """Return the engine that `spec` names.

    Raises:
        UserError: there is no engine of that name, or its address is not a URL.
    """
    name, _, address = spec.partition(":")
    if spec in NAMES[:-1]:  # imported on demand, as each of these modules imports this one
        return importlib.import_module(f"{__name__}.{spec}").ENGINE
    if name == "openai":
        return importlib.import_module(f"{__name__}.openai").OpenAI.at(address)
    raise UserError(f"unknown engine '{spec}'{did_you_mean(name, NAMES)}")

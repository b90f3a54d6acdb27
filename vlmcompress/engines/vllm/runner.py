"""Answers from vLLM, running as a process of its own.

    run = answer(model_folder, requests, media=folder_of_images)
    run.answers["sample-1"].text

The parent writes the requests to a file, starts `worker.py` in a new session and reads events from its standard output.
Whatever happens (an error, a timeout, Ctrl-C, even `kill -9` of the parent), the worker's process group does not outlive
the call. vLLM's log goes to a temporary file; if the engine fails, its last meaningful lines become the error's text.
`VLMCOMPRESS_ENGINE_LOG=FILE` appends it to FILE.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmcompress.engines.vllm import PYTHON_VARIABLE, environment, interpreter
from vlmcompress.errors import UserError

WORKER = Path(__file__).with_name("worker.py")
LOG_VARIABLE = "VLMCOMPRESS_ENGINE_LOG"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """One conversation in OpenAI's format; images are `{"type": "image_url", "image_url": {"url": "file:///..."}}`."""

    id: str
    messages: list[dict[str, Any]]

    def images(self) -> int:
        contents = [message["content"] for message in self.messages if isinstance(message["content"], list)]
        return sum(part["type"] == "image_url" for content in contents for part in content)


@dataclass(frozen=True)
class Settings:
    """How the engine runs.

    Attributes:
        max_tokens: most tokens of an answer.
        max_model_len: context length; -1: the model's own, or what fits into memory if that is less.
        max_num_seqs: sequences in flight; 0: 32 on a CPU, 256 on a GPU.
        start_timeout: seconds until the model must be loaded.
        answer_timeout: seconds in which at least one more answer must come.
    """

    max_tokens: int = 32
    max_model_len: int = -1
    max_num_seqs: int = 0
    dtype: str = "auto"
    seed: int = 0
    start_timeout: float = 1800.0
    answer_timeout: float = 900.0


@dataclass(frozen=True)
class Answer:
    """What the model said. `finish` is vLLM's reason: `stop`, or `length` when `max_tokens` cut it off."""

    id: str
    text: str
    finish: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Run:
    """All answers by request id, what the engine says about itself, and the seconds it took without its start."""

    answers: dict[str, Answer]
    engine: dict[str, Any]
    seconds: float


def answer(
    model: str | Path,
    requests: Sequence[Request],
    *,
    media: str | Path,
    settings: Settings | None = None,
    label: str = "answering",
    progress: Progress | None = None,
) -> Run:
    """Answer all requests greedily.

    Args:
        model: checkpoint folder.
        media: the folder that the requests' images are in; the engine may read no other.
        label: names this run in `progress(label, answered, total)`, and in messages.

    Raises:
        UserError: the engine can't start, fails, stalls, or refuses a request.
    """
    settings, progress = settings or Settings(), progress or (lambda *_: None)
    began, engine, answers = time.monotonic(), {}, {}
    progress(f"{label}: starting vLLM", 0, len(requests))
    with tempfile.TemporaryDirectory(prefix="vlmcompress-engine-") as folder:
        job = _write_job(Path(folder), Path(model), requests, Path(media), settings)
        with contextlib.closing(_events(job, Path(model), settings)) as events:
            for event in events:
                if event["event"] == "ready":
                    began, engine = time.monotonic(), event["engine"]
                else:
                    answers[event["id"]] = Answer(**{k: v for k, v in event.items() if k != "event"})
                progress(label, len(answers), len(requests))
    return Run(answers, engine, round(time.monotonic() - began, 2))


def _write_job(folder: Path, model: Path, requests: Sequence[Request], media: Path, settings: Settings) -> Path:
    with open(folder / "requests.jsonl", "w", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(asdict(request)) + "\n")
    job = {
        "model": str(model.resolve()),
        "requests": str(folder / "requests.jsonl"),
        "media": str(media.resolve()),
        "images_per_prompt": max((request.images() for request in requests), default=0),
        "settings": asdict(settings),
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return folder / "job.json"


def _events(job: Path, model: Path, settings: Settings) -> Generator[dict, None, None]:
    """Start the worker and yield its `ready` and `answer` events. Closing the generator ends the process group."""
    log = job.with_name("engine.log")
    with open(log, "wb") as sink:
        worker = subprocess.Popen(
            [interpreter(), str(WORKER), str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=environment(VLLM_LOGGING_LEVEL="WARNING", VLLM_ENABLE_V1_MULTIPROCESSING="0"),
            start_new_session=True,
        )
    started = False
    try:
        lines = _lines(worker)
        while True:
            limit = settings.answer_timeout if started else settings.start_timeout
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                doing = "gave no answer for" if started else "had not loaded the model after"
                raise UserError(f"vLLM {doing} {limit:g} s with {model}{last_words(log)}") from None
            if line is None:
                code = worker.wait()
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                doing = "died" if started else "could not start"
                raise UserError(f"vLLM {doing} ({how}) with {model}{last_words(log)}")
            event = json.loads(line)
            if event["event"] == "error":
                raise _error(event, model, log)
            if event["event"] == "done":
                return
            started = True
            yield event
    finally:
        stop(worker)
        if kept := os.environ.get(LOG_VARIABLE):
            with open(kept, "ab") as file:
                file.write(log.read_bytes())


def _lines(worker: subprocess.Popen) -> queue.Queue[bytes | None]:
    """The worker's output, line by line, then None; so that waiting for a line can time out."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        assert worker.stdout is not None
        with worker.stdout as stream:
            for line in stream:
                if line.startswith(b"{"):
                    lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _error(event: dict, model: Path, log: Path) -> UserError:
    if event["stage"] == "import":
        return UserError(
            f"vLLM can't be imported by {interpreter()} ({event['message']}); install vlmcompress[serve] (GPU) or "
            f"[serve-cpu] there, or point {PYTHON_VARIABLE} to a Python that has it"
        )
    if event["stage"] == "request":
        return UserError(f"sample '{event['id']}' can't be answered by {model}: {event['message']}")
    message = event["message"]
    if "root cause" in message:  # the engine core is a process of its own and its error is only in the log
        return UserError(f"vLLM could not load {model}{last_words(log)}")
    return UserError(f"vLLM could not load {model}: {message}")


_PREFIX = re.compile(r"^(\([\w ]+pid=\d+\)\s*)?((ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^]]*\]\s*)?")
_NOISE = re.compile(r"$|Traceback |File \"|[~^]+$|raise |return ")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b|.*(error:|Killed|out of memory)")


def last_words(log: Path, most: int = 3) -> str:
    """The last distinct error lines of a log, or else its last lines, as `: a | b`; nothing for an empty log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [_PREFIX.sub("", line.strip()).strip() for line in re.split(r"[\r\n]+", text)]
    lines = [line for line in lines if not _NOISE.match(line)]
    errors = [line for line in lines if _ERROR.match(line)]
    words = list(dict.fromkeys(errors or lines))[-most:]
    return ": " + " | ".join(line[:300] for line in words) if words else ""


def stop(process: subprocess.Popen, grace: float = 5.0) -> None:
    """End a process that leads a session, with all it has started: politely, then for good."""
    for sig, wait in ((signal.SIGTERM, grace if process.poll() is None else 0.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()

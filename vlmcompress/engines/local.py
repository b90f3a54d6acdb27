"""Get answers from an engine that runs in a separate process, on a checkpoint folder.

This side writes the requests to a file, starts `worker.py` in a new session and reads events from its standard output. In any
case (an error, a timeout, Ctrl-C, even `kill -9` of this process) the worker's process group does not outlive the call: its
standard input is held open here and closes when this process ends. The engine's log goes to a temporary file; if the engine
fails, its last meaningful lines become the error's text. `VLMCOMPRESS_ENGINE_LOG=FILE` appends it to FILE.

An engine that dies while answering is restarted once, with the open requests. If it dies again and requests may be refused, it
is restarted to answer them one at a time: the request at which it dies is refused, as vLLM's engine dies of an exception in a
model's code. Dying while loading is final, and so is a timeout, as a retry would take just as long.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlmcompress.engines import Answer, Engine, EngineSettings, Job, Refusals, Request, Run, first_tokens
from vlmcompress.utils import model_folder
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import temporary_folder, torch_cache
from vlmcompress.utils.messages import note

DEADLY = 3
"""Most requests of a run that may crash the engine."""
WORKER = Path(__file__).with_name("worker.py")
LONGEST = 60  # characters of a folder with sockets, whose whole paths have at most 107
LOG_VARIABLE = "VLMCOMPRESS_ENGINE_LOG"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables of an engine's process, unless the user has set them."""

_PREFIX = re.compile(
    r"^(\([\w ]+pid=\d+\)\s*)?((ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^]]*\]\s*)?(\d+\.\d\d\.\d{3}\.\d{3} [EWI]\s+)?"
)
_NOISE = re.compile(r"$|Traceback |File \"|[~^]+$|raise |return |[\w.]*ValidationError: \d+ validation ")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b|.*(error:|error loading |\[type=\w+, |Killed|out of memory)")
_INPUT = re.compile(r" \[type=\w+, .*")  # pydantic appends its input to the message


class Crash(UserError):
    """Raised when the engine's process died after it had loaded the model."""


@dataclass(frozen=True)
class Local(Engine):
    """An engine that runs in a process of `worker.py`.

    Attributes:
        title: its name in messages.
        module: the file that `worker.py` loads, which runs the engine.
        advice: what to do if its Python cannot import the engine, for the error.
        interpreter: function that returns the path of a Python with the engine; by default this one.
        environment: function that returns the worker's environment variables; by default this process's and `OFFLINE`.
        reduce: a visual-token reducer (in the form of `--reduce`) for every model, which overrides the checkpoint's.
        speculative: JSON of vLLM's `--speculative-config`, already checked.
        batch: default number of requests that it computes together, in order; 0: it schedules them itself.
        videos: whether it supports videos.
        shares: whether requests may set the share of visual tokens, where the reducer has `keep_max`.
        remark: function that returns a message about a checkpoint to show before it is loaded, or None.
    """

    name: str
    title: str
    module: Path
    advice: str
    interpreter: Callable[[], str] = lambda: sys.executable
    environment: Callable[[], dict[str, str]] = lambda: {**OFFLINE, **os.environ}
    local: bool = True
    reduce: str | None = None
    speculative: str | None = None
    batch: int = 0
    videos: bool = False
    shares: bool = False
    remark: Callable[[Path], str | None] = lambda model: None

    def _answer(self, job: Job) -> Run:
        if not self.videos and (filmed := next((request for request in job.requests if request.videos()), None)):
            raise UserError(
                f"sample '{filmed.id}' shows a video, and {self.title} is given none; take --engine vllm or hf"
            )
        model = Path(job.model)
        requests = job.requests
        if any(request.keep is not None for request in requests) and not self._takes_shares(model):
            note(f"{model} in {self.title} has no reducer with keep_max: what the data have under 'keep' is left out")
            requests = [replace(request, keep=None) for request in requests]
        engine: dict[str, Any] = {}
        answers: dict[str, Answer] = {}
        unanswered, seconds, crashes, restarts, deadly = list(requests), 0.0, 0, 0, 0
        refusals = Refusals(str(model), job.settings.refusals)
        while True:
            job.progress(f"{job.label}: starting {self.title}", len(answers), len(job.requests))
            began: float | None = None
            alone = crashes > 1
            asking = replace(job.settings, max_num_seqs=1) if alone else job.settings
            try:
                with contextlib.closing(self._run(model, unanswered, job.media, asking)) as events:
                    for event in events:
                        if event["event"] == "ready":
                            began, engine = time.monotonic(), event["engine"]
                        else:
                            refused = event["event"] == "refused"
                            answer = refusals.add(event["id"], event["message"]) if refused else _answer(event)
                            answers[answer.id] = answer
                            job.on_answer(answer)
                        job.progress(job.label, len(answers), len(job.requests))
                break
            except Crash as crash:
                unanswered = [request for request in unanswered if request.id not in answers]
                crashes, restarts = crashes + 1, restarts + 1
                if alone and unanswered:
                    request, deadly, crashes = unanswered.pop(0), deadly + 1, 0
                    answers[request.id] = refusals.add(request.id, f"the engine died of it: {crash}")
                    job.on_answer(answers[request.id])
                if crashes > 1 and unanswered and (refusals.count >= refusals.allowed or deadly >= DEADLY):
                    where = f"{len(unanswered)} requests had no answer, the first is sample '{unanswered[0].id}'"
                    raise Crash(f"{crash}; it had been started again after a first crash; {where}") from crash
                if not unanswered:
                    break
                # the order in which an engine processes them that batches those with equally many images
                kinds = list(dict.fromkeys((request.images(), request.videos()) for request in unanswered))
                unanswered.sort(key=lambda request: kinds.index((request.images(), request.videos())))
                job.progress(
                    f"{job.label}: {crash}; {len(unanswered)} still to answer", len(answers), len(job.requests)
                )
            finally:
                seconds += time.monotonic() - began if began else 0.0
        return Run(answers, engine | {"restarts": restarts}, round(seconds, 2))

    def _takes_shares(self, model: Path) -> bool:
        """Whether requests may set the share of visual tokens of a checkpoint here."""
        from vlmcompress.reduction.block import takes_shares
        from vlmcompress.reduction.choice import parse_reducer

        if self.reduce:
            return self.shares and parse_reducer(self.reduce).takes_shares
        return self.shares and takes_shares(model)

    def _run(self, model: Path, requests: Sequence[Request], media: Path, settings: EngineSettings) -> Generator[dict]:
        job = {
            "media": str(media.resolve()),
            "images_per_prompt": max((request.images() for request in requests), default=0),
            "videos_per_prompt": max((request.videos() for request in requests), default=0),
            "settings": asdict(settings),
            "reduce": self.reduce,
            "speculative": json.loads(self.speculative) if self.speculative else None,
        }
        lines = [asdict(request) for request in requests]
        with model_folder.servable_folder(model) as folder:
            job["model"] = str(folder.resolve())
            timeouts = settings.start_timeout, settings.answer_timeout
            yield from self.events(job, lines, model, *timeouts, refusals=True)

    def events(
        self,
        job: dict[str, Any],
        requests: Sequence[dict],
        model: Path,
        start_timeout: float,
        answer_timeout: float,
        refusals: bool = False,
    ) -> Generator[dict]:
        """Run a worker and yield its `ready`, `answer` and `refused` events. Closing the generator ends the worker.

        Args:
            job: settings for the worker, to which the path of the requests' file is added.
            model: the model, for error messages.
            refusals: whether requests may be refused; otherwise the first refusal is an error.

        Raises:
            UserError: the engine cannot start, times out, or refuses a request; `Crash` if it died.
        """
        if line := self.remark(model):
            note(line)
        with temporary_folder("engine") as folder:
            log, path = folder / "engine.log", folder / "requests.jsonl"
            path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
            (folder / "job.json").write_text(json.dumps(job | {"requests": str(path)}), encoding="utf-8")
            command = [self.interpreter(), str(WORKER), str(self.module), str(folder / "job.json")]
            worker = start_process(command, environment_within(folder, self.environment()), log)
            try:
                for event in self._watch(worker, log, model, start_timeout, answer_timeout):
                    if event["event"] == "refused" and not refusals:
                        Refusals(str(model), 0).add(event["id"], event["message"])
                    yield event
            finally:
                stop_process(worker)
                keep_log(log)

    def _watch(
        self, worker: subprocess.Popen, log: Path, model: Path, start_timeout: float, answer_timeout: float
    ) -> Generator[dict]:
        lines: queue.Queue[bytes | None] = queue.Queue()

        def read() -> None:
            assert worker.stdout is not None
            with worker.stdout as stream:
                for line in stream:
                    if line.startswith(b"{"):
                        lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()  # so that waiting for a line can time out
        limit, started = start_timeout, False
        while True:
            try:
                line = _next(lines, worker, limit)
            except queue.Empty:
                silence = "gave no answer for" if started else "had not loaded the model after"
                raise UserError(f"{self.title} {silence} {limit:g} s with {model}{last_words(log)}") from None
            if line is None:
                end = f"({exit_text(worker.wait())}) with {model}{last_words(log)}"
                raise Crash(f"{self.title} died {end}") if started else UserError(f"{self.title} could not start {end}")
            event = json.loads(line)
            if event["event"] == "error":
                message = event["message"]
                if event["stage"] == "import":
                    problem = f"can't be imported by {self.interpreter()} ({message}); {self.advice}"
                elif (
                    "root cause" in message or "Failed to init server" in message
                ):  # vLLM's and llama.cpp's is in the log
                    problem = f"could not load {model}{last_words(log)}"
                else:
                    problem = f"could not load {model}: {message.removeprefix('UserError: ')}"
                raise UserError(f"{self.title} {problem}")
            if event["event"] == "done":
                return
            limit, started = answer_timeout, True
            yield event


def _answer(event: dict) -> Answer:
    fields = {name: value for name, value in event.items() if name != "event"}
    return Answer(**fields | {"first": first_tokens(fields["first"]) if fields.get("first") else None})


def _next(lines: queue.Queue[bytes | None], worker: subprocess.Popen, limit: float) -> bytes | None:
    """The worker's next line; None once it has ended, even if one of its child processes keeps the output open.

    Raises:
        queue.Empty: there was no line within `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while True:
        ended = worker.poll() is not None  # checked before waiting, so that its last output is not missed
        try:
            return lines.get(timeout=max(0.0, min(1.0, deadline - time.monotonic())))
        except queue.Empty:
            if ended:
                return None
            if time.monotonic() > deadline:
                raise


def environment_within(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """`environment` for an engine whose sockets and other temporary files go into `folder`, as vLLM leaves them behind."""
    within = {} if len(str(folder)) > LONGEST else {"TMPDIR": str(folder)}
    return torch_cache() | environment | within


def start_process(
    command: Sequence[str], environment: dict[str, str], log: Path, *, piped: bool = True
) -> subprocess.Popen:
    """Start a process in a new session, with a pipe as its standard input, so that it can end when this process does.

    Args:
        log: file for its standard error, overwritten.
        piped: read its standard output from a pipe; False: write it to the log, too.

    Raises:
        UserError: its log could not be kept in the file that `VLMCOMPRESS_ENGINE_LOG` names.
    """
    try:
        open(os.environ.get(LOG_VARIABLE) or os.devnull, "ab").close()
    except OSError as error:
        raise UserError(
            f"{LOG_VARIABLE}: cannot write {error.filename} ({error.strerror}); name another file"
        ) from error
    with open(log, "wb") as sink:
        out = subprocess.PIPE if piped else sink
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=sink, start_new_session=True
        )


def stop_process(process: subprocess.Popen, grace: float = 5.0) -> None:
    """End a session's leading process and all its children: by SIGTERM, after `grace` seconds by SIGKILL.

    An exception that interrupts the wait is raised again once all are killed.
    """

    def send(sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sig)

    try:
        if process.poll() is None:
            send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
    finally:
        send(signal.SIGKILL)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)


def exit_text(code: int) -> str:
    """Describe an exit status in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def keep_log(log: Path) -> None:
    """Append a log to the file that `VLMCOMPRESS_ENGINE_LOG` names, if it names one."""
    try:
        with open(os.environ.get(LOG_VARIABLE) or os.devnull, "ab") as file:
            file.write(log.read_bytes())
    except OSError as error:
        note(f"{LOG_VARIABLE}: the engine's log is not kept, {error.filename or log}: {error.strerror}")


def last_words(log: Path) -> str:
    """The last three distinct error lines of a log or, without any, its last lines, as `: a | b`; empty for an empty log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [_PREFIX.sub("", line.strip()).strip() for line in re.split(r"[\r\n]+", text)]
    lines = [line for line in lines if not _NOISE.match(line)]
    errors = [line for line in lines if _ERROR.match(line)]
    words = list(dict.fromkeys(_INPUT.sub("", line) for line in errors or lines))[-3:]
    return ": " + " | ".join(line[:300] for line in words) if words else ""

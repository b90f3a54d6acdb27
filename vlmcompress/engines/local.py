"""Get answers from an engine that runs as a process of its own, on a checkpoint folder.

This side writes the requests to a file, starts `worker.py` in a new session and reads events from its standard output.
Whatever happens (an error, a timeout, Ctrl-C, even `kill -9` of this process), the worker's process group does not
outlive the call. The engine's log goes to a temporary file; if the engine fails, its last meaningful lines become the
error's text. `VLMCOMPRESS_ENGINE_LOG=FILE` appends it to FILE.

An engine that dies while it answers is started once more, with the requests that are still open. Dying while it loads is
final, and so is silence: both would only take as long again.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmcompress.engines import process
from vlmcompress.engines.base import Answer, Progress, Request, Run, Settings, first_tokens
from vlmcompress.errors import UserError

WORKER = Path(__file__).with_name("worker.py")


class Crash(UserError):
    """Raised when the engine's process died after it had loaded the model."""


@dataclass(frozen=True)
class Local:
    """An engine that runs in a process of `worker.py`.

    Attributes:
        title: its name for people.
        module: the file that `worker.py` loads, which runs the engine.
        interpreter: function that gives the path of a Python that has the engine.
        environment: function that gives the environment variables of the worker.
        advice: what to do when that Python can't import the engine, for the error.
        reduce: a visual-token reducer (as `--reduce` has it) for every model, whatever its checkpoint carries.
        speculative: JSON of vLLM's `--speculative-config`, already checked.
        batch: requests that it computes together, in their order, unless the settings say; 0: as they come.
    """

    name: str
    title: str
    module: Path
    interpreter: Callable[[], str]
    environment: Callable[[], dict[str, str]]
    advice: str
    local: bool = True
    reduce: str | None = None
    speculative: str | None = None
    batch: int = 0

    def answer(
        self,
        model: str | Path,
        requests: Sequence[Request],
        *,
        media: str | Path,
        settings: Settings | None = None,
        label: str = "answering",
        progress: Progress | None = None,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> Run:
        """Answer all requests greedily; see `base.Engine`."""
        settings, progress, model = settings or Settings(), progress or (lambda *_: None), Path(model)
        on_answer = on_answer or (lambda _: None)
        engine: dict[str, Any] = {}
        answers: dict[str, Answer] = {}
        owed, seconds, crashes = list(requests), 0.0, 0
        while True:
            progress(f"{label}: starting {self.title}", len(answers), len(requests))
            began: float | None = None
            try:
                with contextlib.closing(self._run(model, owed, Path(media), settings)) as events:
                    for event in events:
                        if event["event"] == "ready":
                            began, engine = time.monotonic(), event["engine"]
                        else:
                            found = _answer(event)
                            answers[found.id] = found
                            on_answer(found)
                        progress(label, len(answers), len(requests))
                break
            except Crash as crash:
                owed, crashes = [request for request in owed if request.id not in answers], crashes + 1
                if crashes > 1:
                    raise Crash(f"{crash}; it had been started again after a first crash") from crash
                if not owed:
                    break
                progress(f"{label}: {crash}; {len(owed)} still to answer", len(answers), len(requests))
            finally:
                seconds += time.monotonic() - began if began else 0.0
        return Run(answers, engine | {"restarts": crashes}, round(seconds, 2))

    def _run(self, model: Path, requests: Sequence[Request], media: Path, settings: Settings) -> Generator[dict]:
        job = {
            "model": str(model.resolve()),
            "media": str(media.resolve()),
            "images_per_prompt": max((request.images() for request in requests), default=0),
            "settings": asdict(settings),
            "reduce": self.reduce,
            "speculative": json.loads(self.speculative) if self.speculative else None,
        }
        lines = [asdict(request) for request in requests]
        yield from self.events(job, lines, model, settings.start_timeout, settings.answer_timeout)

    def events(
        self, job: dict[str, Any], requests: Sequence[dict], model: Path, start_timeout: float, answer_timeout: float
    ) -> Generator[dict]:
        """Run a worker and yield its `ready` and `answer` events. Closing the generator ends the worker.

        Args:
            job: settings for the worker, to which the path of the requests' file is added.
            model: the model, for error messages.

        Raises:
            UserError: the engine can't start, is silent for too long, or refuses a request; `Crash` if it died.
        """
        with tempfile.TemporaryDirectory(prefix="vlmcompress-engine-") as folder:
            log, path = Path(folder, "engine.log"), Path(folder, "requests.jsonl")
            path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
            Path(folder, "job.json").write_text(json.dumps(job | {"requests": str(path)}), encoding="utf-8")
            command = [self.interpreter(), str(WORKER), str(self.module), str(Path(folder, "job.json"))]
            worker = process.start(command, self.environment(), log)
            try:
                yield from self._watch(worker, log, model, start_timeout, answer_timeout)
            finally:
                process.stop(worker)
                process.keep(log)

    def _watch(
        self, worker: subprocess.Popen, log: Path, model: Path, start_timeout: float, answer_timeout: float
    ) -> Generator[dict]:
        lines, limit, started = _lines(worker), start_timeout, False
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                doing = "gave no answer for" if started else "had not loaded the model after"
                raise UserError(f"{self.title} {doing} {limit:g} s with {model}{process.last_words(log)}") from None
            if line is None:
                how = f"({process.how_it_ended(worker.wait())}) with {model}{process.last_words(log)}"
                raise Crash(f"{self.title} died {how}") if started else UserError(f"{self.title} could not start {how}")
            event = json.loads(line)
            if event["event"] == "error":
                raise self._error(event, model, log)
            if event["event"] == "done":
                return
            limit, started = answer_timeout, True
            yield event

    def _error(self, event: dict, model: Path, log: Path) -> UserError:
        message = event["message"]
        if event["stage"] == "import":
            return UserError(f"{self.title} can't be imported by {self.interpreter()} ({message}); {self.advice}")
        if event["stage"] == "request":
            return UserError(f"sample '{event['id']}' can't be answered by {model}: {message}")
        if "root cause" in message:  # the engine core is a process of its own and its error is only in the log
            return UserError(f"{self.title} could not load {model}{process.last_words(log)}")
        return UserError(f"{self.title} could not load {model}: {message}")


def _answer(event: dict) -> Answer:
    fields = {name: value for name, value in event.items() if name != "event"}
    return Answer(**fields | {"first": first_tokens(fields["first"]) if fields.get("first") else None})


def _lines(worker: subprocess.Popen) -> queue.Queue[bytes | None]:
    """A queue of the worker's output, line by line, then None, so that waiting for a line can time out."""
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

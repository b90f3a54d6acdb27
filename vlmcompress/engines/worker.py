"""Process of an engine, started by `engines.local`: answer a file of chat requests and write the answers as JSON lines.

Run by path, `python worker.py ENGINE.py JOB.json`, in whatever environment has the engine; imports only the standard
library. ENGINE.py is loaded by path, too, and has

    PACKAGE                              what must be importable
    start(job) -> (engine, description)  loads the model; `start_seconds` is added to the description
    answers(engine, requests, job) yields (id, answer) as they are ready; an exception instead of an answer means that the
    request is refused. A raised exception means that the engine is broken.

One line of standard output is one event:

    {"event": "ready", "engine": {...}}          the model is loaded
    {"event": "answer", "id", "text", "finish", "prompt_tokens", "output_tokens", "first": [[token, logprob], ...] | null}
    {"event": "refused", "id", "message"}        there is no answer to this request
    {"event": "error", "stage": "import" | "start", "message"}
    {"event": "done"}

Output of libraries goes to standard error. Standard input is a lifeline: when it closes, the parent has ended, and a separate
watcher process kills the whole process group.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback


def claim_stdout():
    """Open our own handle on standard output; all other writes to it go to standard error from now on."""
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private


def end_with_parent() -> None:
    """Start a watcher process that kills our process group when standard input closes. Call it before starting threads.

    A thread or a signal handler would not work: a computation that holds Python's lock blocks both, and if this process dies,
    its children would continue. The watcher is in the group itself, so that the group's id cannot be reused, and only the
    parent ends it, with SIGKILL.
    """
    if os.fork():
        return
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # otherwise readers would also wait for this process
        os.dup2(null, stream)
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def load(path: str):
    """Load a module from its file."""
    spec = importlib.util.spec_from_file_location("engine_worker", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def events(module, job: dict):
    """Run the job and yield its events in order."""
    try:
        importlib.import_module(module.PACKAGE)
    except ImportError as error:
        yield {"event": "error", "stage": "import", "message": one_line(error)}
        return
    began = time.monotonic()
    try:
        engine, about = module.start(job)
    except Exception as error:
        yield {"event": "error", "stage": "start", "message": one_line(error)}
        raise
    yield {"event": "ready", "engine": {**about, "start_seconds": round(time.monotonic() - began, 2)}}
    with open(job["requests"], encoding="utf-8") as file:
        for name, answer in module.answers(engine, map(json.loads, file), job):
            if isinstance(answer, Exception):
                yield {"event": "refused", "id": name, "message": one_line(answer)}
                continue
            yield {"event": "answer", "id": name, **answer}
    yield {"event": "done"}


def main() -> None:
    end_with_parent()
    out = claim_stdout()
    module_file, job_file = sys.argv[1:]
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    try:
        for event in events(load(module_file), job):
            print(json.dumps(event), file=out, flush=True)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # all is written; the engine's own shutdown only costs time


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # our modules must not shadow others
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    main()

"""Run a vLLM server for as long as a `with` block lasts.

    with server("OUT", flags=["--no-enable-prefix-caching"]) as running:
        requests.get(f"{running.url}/v1/models")

It is the server of `vlmcompress serve`, in a session of its own, and does not outlive this process.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress.engines import process
from vlmcompress.engines.vllm import environment, interpreter, serve
from vlmcompress.errors import UserError

HOST = "127.0.0.1"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has nothing to do with this machine


@dataclass(frozen=True)
class Server:
    """A running server. `name`: the model's name there; `log_path`: its log; `pid`: its process, which leads a session."""

    url: str
    name: str
    log_path: Path
    pid: int
    start_seconds: float


@contextlib.contextmanager
def server(
    model: str | Path,
    *,
    port: int | None = None,
    flags: Sequence[str] = (),
    images: int = 4,
    max_model_len: int | None = None,
    speculative: str | None = None,
    timeout: float = 1800.0,
    log: str | Path | None = None,
) -> Iterator[Server]:
    """Serve a checkpoint on this machine.

    Args:
        model: checkpoint folder.
        port: port to listen on; None: a free one.
        flags: further flags of `vllm serve`; they win over the ones found for the checkpoint.
        images: the most images in one request.
        speculative: JSON of vLLM's `--speculative-config`; None: no speculative decoding.
        timeout: seconds until the server must answer.
        log: file for the server's log, overwritten; None: a temporary one, gone when the block ends.

    Raises:
        UserError: no such checkpoint, no engine, the port is taken, or the server does not come up.
    """
    model, port = Path(model), port or _free_port()
    serve.check_port(HOST, port)
    limits: dict[str, Any] = {"images": images, "max_model_len": max_model_len}
    arguments = serve.flags(model, host=HOST, port=port, **limits, speculative=speculative, extra=flags)
    command = [interpreter(), str(serve.SERVER), "--end-with-parent", *arguments]
    began, url = time.monotonic(), f"http://{HOST}:{port}"
    with tempfile.TemporaryDirectory(prefix="vlmcompress-server-") as folder:
        log = Path(log or Path(folder, "log"))
        running = process.start(command, environment(), log, piped=False)
        try:
            _wait(running, model, url, timeout, log)
            yield Server(url, serve.name(model), log, running.pid, round(time.monotonic() - began, 2))
        finally:
            process.stop(running, grace=20.0)
            process.keep(log)


def _wait(running: subprocess.Popen, model: Path, url: str, timeout: float, log: Path) -> None:
    end = time.monotonic() + timeout
    while not _healthy(url):
        if (code := running.poll()) is not None:
            how = process.how_it_ended(code)
            raise UserError(f"vLLM's server could not start ({how}) with {model}{process.last_words(log)}")
        if time.monotonic() > end:
            raise UserError(f"vLLM's server was not up after {timeout:g} s with {model}{process.last_words(log)}")
        time.sleep(0.25)


def _healthy(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]

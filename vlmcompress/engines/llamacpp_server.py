"""llama.cpp's OpenAI-compatible server (of the package `xllamacpp`) as a process, for `serve_gguf` and `bench`.

    with server("OUT") as running:
        requests.get(f"{running.url}/v1/models")

The engine uses `parameters` as well. With `cached` a prompt reuses the common prefix with the last prompt in its slot, as
`llama-server` does by default; nothing else is cached. This file is run by path: `python llamacpp_server.py FOLDER HOST PORT
CONTEXT SLOTS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmcompress.engines.vllm.serve import Server

FILES = ("model.gguf", "mmproj.gguf")
SLOTS = 4  # concurrent requests
LONGEST = 8192  # default context length: a cache for the model's full length may not fit into memory


def is_gguf(folder: str | Path) -> bool:
    """Whether a folder holds a checkpoint for llama.cpp."""
    return Path(folder, FILES[0]).is_file()


def parameters(folder: Path, *, context: int, slots: int, limits: tuple[int, int] | None) -> Any:
    """xllamacpp's parameters for a server with `slots` concurrent requests, each of at most `context` tokens.

    Args:
        limits: least and most visual tokens of an image, which llama.cpp does not read from a file; None: its defaults.
    """
    import xllamacpp

    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = (str(folder / name) for name in FILES)
    params.n_ctx, params.n_parallel = context * slots, slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = params.fit_params = False
    # llama-server divides n_ctx among its slots; `cache_ram_mib` caches prompts of other slots, which would distort
    # benchmarks.
    params.cache_ram_mib = 0
    if limits:
        params.image_min_tokens, params.image_max_tokens = limits
    return params


def positions(folder: Path) -> int:
    """The model's longest context, in tokens."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    return text.get("max_position_embeddings") or LONGEST


def command(folder: Path, host: str, port: int, context: int | None, slots: int) -> list[str]:
    """The arguments of a process that serves a checkpoint.

    Raises:
        UserError: the package is missing, the folder is damaged, the port is taken, or the context is longer than the model's.
    """
    from vlmcompress.engines.vllm.serve import require_free_port
    from vlmcompress.utils.errors import UserError

    if find_spec("xllamacpp") is None:
        raise UserError(
            f"{folder} is GGUF; for llama.cpp's server: pip install '.[llamacpp]' in the checkout of vlmcompress"
        )
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}; write it by quantize --format gguf")
    longest = positions(folder)
    if context is not None and not 0 < context <= longest:
        raise UserError(f"--max-model-len is {context}; give 1 to {longest}, the model's context, or leave it out")
    require_free_port(host, port)
    length = context or min(longest, LONGEST)
    return [sys.executable, __file__, str(folder.resolve()), host, str(port), str(length), str(slots)]


def serve_gguf(folder: str | Path, host: str, port: int, context: int | None, refused: list[str]) -> None:
    """Replace this process by the server; `refused`: given flags that only vLLM has. Raises like `command`."""
    from vlmcompress.engines.vllm.serve import example
    from vlmcompress.utils.errors import UserError

    folder = Path(folder)
    if refused:
        raise UserError(f"{folder} is GGUF, and llama.cpp's server has no {refused[0]}; leave it out")
    arguments = command(folder, host, port, context, SLOTS)
    print(f"llama.cpp's server (xllamacpp)\n\n{example(folder, host, port)}\n", file=sys.stderr, flush=True)
    os.execv(arguments[0], arguments)


@contextlib.contextmanager
def gguf_server(model: str | Path, *, max_model_len: int | None, slots: int) -> Iterator[Server]:
    """Context manager: serve a checkpoint on this machine, where no prompt reuses another's cached prefix.

    Args:
        slots: concurrent requests.

    Raises:
        UserError: as in `command`, or the server does not start.
    """
    from vlmcompress.engines.local import keep_log, start_process, stop_process
    from vlmcompress.engines.vllm.serve import HOST, Server, free_port, wait
    from vlmcompress.export.readers import served_name
    from vlmcompress.utils.folders import temporary_folder

    folder, port, began = Path(model), free_port(), time.monotonic()
    url = f"http://{HOST}:{port}"
    arguments = [*command(folder, HOST, port, max_model_len, slots), "end-with-parent", "fresh"]
    with temporary_folder("server") as place:
        log = place / "log"
        running = start_process(arguments, dict(os.environ), log, piped=False)
        try:
            wait(running, folder, url, 600.0, log, "llama.cpp's server")
            yield Server(url, served_name(folder), log, running.pid, round(time.monotonic() - began, 2))
        finally:
            stop_process(running, grace=20.0)
            keep_log(log)


def main() -> None:
    """Serve until a signal ends this process, at once: xllamacpp's `~Server` can wait for ever when Python exits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    folder, host, port, context, slots, *rest = sys.argv[1:]
    if "end-with-parent" in rest:
        import runpy

        runpy.run_path(str(Path(__file__).with_name("worker.py")))["end_with_parent"]()
    import xllamacpp
    from transformers import AutoProcessor

    from vlmcompress.export.launch_files import token_limits
    from vlmcompress.export.readers import served_name

    processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    limits = token_limits(Path(folder), processor)
    params = parameters(Path(folder), context=int(context), slots=int(slots), limits=limits)
    params.hostnames, params.port, params.model_alias = [host], int(port), {served_name(folder)}
    params.endpoint_metrics = True
    params.cache_prompt = "fresh" not in rest
    running = xllamacpp.Server(params)
    print(f"llama.cpp answers at {running.listening_address}", file=sys.stderr, flush=True)
    signal.pause()


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != str(Path(__file__).parent)]
    main()

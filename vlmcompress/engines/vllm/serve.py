"""Start vLLM's own OpenAI-compatible server with the flags that a checkpoint needs.

`serve` replaces this process by it (`vlmcompress serve`), `server` runs it for as long as a `with` block lasts:

    with server("OUT", flags=["--no-enable-prefix-caching"]) as running:
        requests.get(f"{running.url}/v1/models")

The flags are plain `vllm serve` flags and are printed, so that they can be used elsewhere, with a line for each flag that
permits or forbids something; flags that the user adds after `--` come last and win.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress import models
from vlmcompress.engines.local import environment_within, exit_text, keep_log, last_words, start_process, stop_process
from vlmcompress.engines.vllm import ENVIRONMENT, environment, installed, interpreter, slow, speculation
from vlmcompress.export import readers
from vlmcompress.reduction import support
from vlmcompress.utils import model_folder, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import temporary_folder
from vlmcompress.utils.messages import note

if TYPE_CHECKING:
    from vlmcompress.reduction.choice import ReducerChoice

SERVER = Path(__file__).with_name("server.py")
LIMITS = "--limit-mm-per-prompt"
TRUST = "--trust-request-mm-kwargs"  # without it vLLM rejects requests with `mm_processor_kwargs` (status 400)
DOMAINS = "--allowed-media-domains"
HOST = "127.0.0.1"
MOST = 10**6  # images or videos of a request, tokens of a context
AUTO_TOOLS, PARSER = "--enable-auto-tool-choice", "--tool-call-parser"
EAGER = "--enforce-eager"  # `server.py` adds it on CPUs, where compiling the model takes minutes
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# Scales for FP8 attention in the vision tower, as vLLM's `mm_encoder_attention.py` reads them: JSON, name of the attention
# layer in vLLM -> {"q", "k", "v"}, by which queries, keys and values are divided before they become float8_e4m3. Nothing
# else in the checkpoint depends on them: without the flags the tower computes in 16 bits.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine


def serve(model: str | Path, *, host: str = HOST, port: int = 8000, **settings: Any) -> None:
    """Replace this process by the server. Does not return; Ctrl-C and SIGTERM reach vLLM itself.

    Args:
        model: checkpoint folder.
        settings: see `arguments_of`.

    Raises:
        UserError: there is no such checkpoint, vLLM does not serve its reducer, there is no engine, the port is taken, or
            checkpoint or engine do not support the speculation.
    """
    model = Path(model)
    if (model / "openvino_language_model.xml").is_file():
        raise UserError(f"{model} is OpenVINO, which vLLM does not serve; ask it: python {model}/serve/ask_openvino.py")
    python = interpreter()
    arguments = arguments_of(model, host=host, port=port, **settings)
    require_free_port(host, port)
    if line := slow(model):
        note(line)
    text = [line_of(arguments), *remarks(arguments), f"\n{example(model, host, port)}\n"]
    print("\n".join(text), file=sys.stderr, flush=True)
    os.execve(python, [python, str(SERVER), *arguments], environment())


@dataclass(frozen=True)
class Server:
    """A running server. `name`: the model's name there; `log_path`: its log; `pid`: its process, which leads its session."""

    url: str
    name: str
    log_path: Path
    pid: int
    start_seconds: float


@contextlib.contextmanager
def vllm_server(
    model: str | Path,
    *,
    flags: Sequence[str] = (),
    timeout: float = 1800.0,
    log: str | Path | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Serve a checkpoint on a free port of this machine.

    Args:
        model: checkpoint folder.
        flags: further flags of `vllm serve`; they override the checkpoint's.
        timeout: seconds within which the server must answer.
        settings: see `arguments_of`.
        log: file for the server's log, overwritten; None: a temporary one, deleted at the end.

    Raises:
        UserError: there is no such checkpoint or no engine, or the server does not start.
    """
    model, port = Path(model), free_port()
    arguments = arguments_of(model, port=port, extra=flags, **settings)
    if line := slow(model):
        note(line)
    command = [interpreter(), str(SERVER), "--end-with-parent", *arguments]
    began, url = time.monotonic(), f"http://{HOST}:{port}"
    with temporary_folder("server") as folder:
        log = Path(log or folder / "log")
        running = start_process(command, environment_within(folder, environment()), log, piped=False)
        try:
            wait(running, model, url, timeout, log, "vLLM's server")
            yield Server(url, readers.served_name(model), log, running.pid, round(time.monotonic() - began, 2))
        finally:
            stop_process(running, grace=20.0)
            keep_log(log)


def wait(running: subprocess.Popen, model: Path, url: str, timeout: float, log: Path, title: str) -> None:
    """Wait until a server answers at `/health`. Raises UserError if it ends before that, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not _healthy(url):
        if (code := running.poll()) is not None:
            end = exit_text(code)
            raise UserError(f"{title} could not start ({end}) with {model}{last_words(log)}")
        if time.monotonic() > deadline:
            raise UserError(f"{title} was not up after {timeout:g} s with {model}{last_words(log)}")
        time.sleep(0.25)


def _healthy(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def arguments_of(
    model: Path,
    *,
    host: str = HOST,
    port: int = 8000,
    images: int = 4,
    videos: int = 0,
    max_model_len: int | None = None,
    speculative: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """List the arguments of `vllm serve` for a checkpoint: its folder, then flags.

    Args:
        model: checkpoint folder.
        host, port: where the server listens.
        images, videos: the most images and videos per request.
        max_model_len: context length; None: the model's own, or what fits into memory if that is less.
        speculative: JSON of vLLM's `--speculative-config`; None: no speculative decoding.
        extra: further flags of `vllm serve`, which come last and win.

    Raises:
        UserError: a number is out of range, or there is no such folder, or none that vLLM reads with these flags.
    """
    counts = {"images-per-request": (images, 0), "videos-per-request": (videos, 0), "max-model-len": (max_model_len, 1)}
    for flag, (value, least) in counts.items():
        if value is not None and not least <= value <= MOST:
            raise UserError(f"--{flag} is {str(value)[:40]}, it should be from {least} to {MOST:,}")
    if not model.is_dir():
        raise UserError(f"{model}: no such checkpoint folder")
    config: dict[str, Any] = schema.read_typed(model_folder.Config, model / "config.json", "give a checkpoint's folder")
    readers.require_readable(model, ["vllm"], "write another format with vlmcompress export")
    require_length(max_model_len, config)
    reducer = _reducer(model, config)
    arguments = [
        str(model.resolve()),
        "--served-model-name",
        readers.served_name(model),
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        "auto",
        "--max-model-len",
        "auto" if max_model_len is None else str(max_model_len),
        LIMITS,
        json.dumps({"image": images, "video": videos}),
    ]
    if (config.get("quantization_config") or {}).get("kv_cache_scheme"):
        arguments += ["--kv-cache-dtype", "fp8"]
    if reducer is not None and reducer.takes_shares:
        arguments.append(TRUST)
    if not {AUTO_TOOLS, f"--no-{AUTO_TOOLS[2:]}", PARSER} & {flag.partition("=")[0] for flag in extra}:
        arguments += _tools(model, config)
    _require_whole_groups(model, config, extra)
    if (last := speculation.last_setting(extra)) is not None:
        speculative, extra = last, speculation.without_setting(extra)
    if speculative is not None:
        arguments += speculation.speculative_flags(model, speculative)
    return [*arguments, *extra]


def line_of(arguments: Sequence[str]) -> str:
    """The command line that starts the same server with vLLM's own command, including environment variables and, on a CPU, the
    flags that `server.py` adds."""
    cpu = installed().cpu
    chosen = {EAGER, f"--no-{EAGER[2:]}", "--compilation-config", "-cc"} & {
        flag.partition("=")[0] for flag in arguments
    }
    variables = [
        f"{name}={shlex.quote(value)}"
        for name, value in ENVIRONMENT.items()
        if name not in os.environ and (cpu or not name.startswith("VLLM_CPU_"))
    ]
    eager = [EAGER] if cpu and not chosen else []
    return " ".join([*variables, "vllm serve", shlex.join([*arguments, *eager])])


def remarks(arguments: Sequence[str]) -> list[str]:
    """Explain a checkpoint's flags that permit or forbid something and that the user did not set, one line each."""
    names, lines = [argument.partition("=")[0] for argument in arguments], []
    if names.count(LIMITS) == 1 and json.loads(arguments[names.index(LIMITS) + 1])["video"] == 0:
        lines.append("Requests can have no videos; --videos-per-request N lets them have N, where the model takes any.")
    listens = speculation.last_setting(arguments, ("--host",))
    if listens not in (HOST, "localhost", "::1") and DOMAINS not in names:
        lines.append(
            f"warning: whoever reaches {listens} can have this server fetch any http address, also of its own network; "
            f"{DOMAINS} HOST,... names those that it may."
        )
    if TRUST in names and f"--no-{TRUST[2:]}" not in names:
        lines.append(
            f'Requests may set "mm_processor_kwargs": {{"keep": 0.75}}. vLLM takes that only with {TRUST}, which lets clients '
            "change how images are processed, too; serve those you trust."
        )
    if PARSER in names:
        lines.append(f"Requests may bring tools, whose calls '{arguments[names.index(PARSER) + 1]}' reads.")
    return lines


def example(model: Path, host: str, port: int) -> str:
    """Write a command that asks the server about an image."""
    address = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}/v1"
    return f"""Ask it, once it says that it is up:
curl {address}/chat/completions -H 'Content-Type: application/json' -d @- <<JSON
{{"model": "{readers.served_name(model)}", "max_tokens": 64, "messages": [{{"role": "user", "content": [
  {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,$(base64 -w0 image.png)"}}}},
  {{"type": "text", "text": "What is in this image?"}}]}}]}}
JSON"""


def _reducer(model: Path, config: dict) -> ReducerChoice | None:
    """The reducer that a checkpoint carries, if any. UserError if vLLM would refuse it, as vLLM would show a traceback."""
    names = config.get("architectures") or []
    if "vlmcompress" not in config and not any(str(name).startswith(support.PREFIX) for name in names):
        return None
    from vlmcompress.engines.vllm import plugin  # which brings torch along

    try:
        reducer = plugin.served_reducer(model)
    except UserError as error:
        raise UserError(f"{model}: {error}") from error
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "vlmcompress" not in plugins.split(","):
        raise UserError(f"{model} needs vLLM's plugin 'vlmcompress', which VLLM_PLUGINS='{plugins}' leaves out; add it")
    return reducer


def _tools(model: Path, config: dict) -> list[str]:
    """Flags that enable tools in requests, if the chat template presents them to the model in the family's format."""
    texts = [
        (model / name).read_text(encoding="utf-8", errors="replace") for name in TEMPLATES if (model / name).is_file()
    ]
    if not any("tools" in text for text in texts):
        return []
    try:
        spec = models.spec_for(config)
    except UserError:
        return []  # a family that is not ours
    if spec.engine.tool_calls is None or not any(spec.engine.tool_calls[1] in text for text in texts):
        return []
    return [AUTO_TOOLS, PARSER, spec.engine.tool_calls[0]]


def _require_whole_groups(model: Path, config: dict, extra: Sequence[str]) -> None:
    """Raise `UserError` if the flags of `vllm serve` split a checkpoint over devices in a way that divides its scale
    groups."""
    count = speculation.last_setting(extra, ("--tensor-parallel-size", "-tp")) or ""
    if not config.get("quantization_config") or not count.isdecimal() or int(count) < 2:
        return
    from vlmcompress.engines.vllm import partition  # which brings torch along

    try:
        layers = partition.stored_layers(model)
    except UserError:
        return  # another tool's format that is not read here: left to vLLM
    if {"--enable-expert-parallel", "-ep"} & set(extra):
        layers = [layer for layer in layers if layer.group.expert is None]
    if problem := partition.partition_problem(layers, int(count)):
        raise UserError(f"{model}: {problem}")


def require_length(max_model_len: int | None, config: Mapping[str, Any]) -> None:
    """Raise `UserError` for a context longer than the model's, which vLLM refuses with a traceback.

    Scaled positions (YaRN, dynamic RoPE, ...) are left to vLLM; VLLM_ALLOW_LONG_MAX_MODEL_LEN disables the check.
    """
    # vLLM 0.32 `config/model.py::_get_and_verify_max_len` raises a ValueError, the reason is the last line of its traceback.
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    scaled = any(scaling.get(key) not in (None, "default", "mrope") for key in ("rope_type", "type"))
    limit = text.get("max_position_embeddings")
    if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").lower() in ("1", "true") or scaled:
        return
    if max_model_len is not None and isinstance(limit, int) and max_model_len > limit:
        raise UserError(
            f"--max-model-len is {max_model_len}, more than the model's context of {limit} tokens; give {limit} or less, or "
            "leave it out"
        )


def require_free_port(host: str, port: int) -> None:
    """Raise `UserError` if the port can't be listened on."""
    if not 0 < port < 2**16:
        raise UserError(f"--port {port} is no port; choose one from 1 to {2**16 - 1}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"{host}:{port} can't be listened on ({error.strerror}); choose another --port") from error

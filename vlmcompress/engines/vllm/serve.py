"""`vlmcompress serve`: vLLM's own OpenAI-compatible server with the flags a checkpoint needs.

The flags are plain `vllm serve` flags and are printed, so that they can be taken elsewhere; whatever the user adds after
`--` comes last and wins.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from vlmcompress.engines.vllm import environment, interpreter, plugin
from vlmcompress.errors import UserError

SERVER = Path(__file__).with_name("server.py")


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    images: int = 4,
    max_model_len: int | None = None,
    extra: Sequence[str] = (),
) -> None:
    """Replace this process by the server. Does not return; Ctrl-C and SIGTERM reach vLLM itself.

    Args:
        model: checkpoint folder.
        images: most images of one request.
        max_model_len: context length; None: the model's own, or what fits into memory if that is less.
        extra: further flags of `vllm serve`.

    Raises:
        UserError: no such checkpoint, one whose reducer vLLM does not serve, no engine, or the port is taken.
    """
    model = Path(model)
    python = interpreter()
    arguments = flags(model, host=host, port=port, images=images, max_model_len=max_model_len, extra=extra)
    check_port(host, port)
    print(f"vllm serve {shlex.join(arguments)}\n\n{example(model, host, port)}\n", file=sys.stderr, flush=True)
    command = [python, str(SERVER), *arguments]
    os.execve(python, command, environment())


def flags(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    images: int = 4,
    max_model_len: int | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The arguments of `vllm serve` for a checkpoint: its folder, then flags."""
    for flag, value, least in (("--images", images, 0), ("--max-model-len", max_model_len, 1)):
        if value is not None and value < least:
            raise UserError(f"{flag} is {value}, it should be at least {least}")
    config = _config(model)
    _check_reducer(model, config)
    arguments = [
        str(model.resolve()),
        "--served-model-name",
        name(model),
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        "auto",
        "--max-model-len",
        "auto" if max_model_len is None else str(max_model_len),
        "--limit-mm-per-prompt",
        json.dumps({"image": images, "video": 0}),
    ]
    if (config.get("quantization_config") or {}).get("kv_cache_scheme"):
        arguments += ["--kv-cache-dtype", "fp8"]
    return [*arguments, *extra]


def name(model: Path) -> str:
    """What the server calls the model: its folder's name."""
    return model.resolve().name


def example(model: Path, host: str, port: int) -> str:
    """How to ask the server about an image, for a terminal."""
    address = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}/v1"
    return f"""Ask it, once it says that it is up:
curl {address}/chat/completions -H 'Content-Type: application/json' -d @- <<JSON
{{"model": "{name(model)}", "max_tokens": 64, "messages": [{{"role": "user", "content": [
  {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,$(base64 -w0 image.png)"}}}},
  {{"type": "text", "text": "What is in this image?"}}]}}]}}
JSON"""


def _config(model: Path) -> dict:
    if not model.is_dir():
        raise UserError(f"{model}: no such checkpoint folder")
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{model}/config.json can't be read ({error}); is this a checkpoint?") from error
    if not isinstance(config, dict):
        raise UserError(f"{model}/config.json holds no JSON object; is this a checkpoint?")
    return config


def _check_reducer(model: Path, config: dict) -> None:
    """UserError where vLLM would refuse the reducer that a checkpoint carries; it would say so behind a traceback."""
    names = config.get("architectures") or []
    if "vlmcompress" not in config and not any(str(name).startswith(plugin.PREFIX) for name in names):
        return
    from vlmcompress.checkpoint import reducer_block  # which brings torch along

    try:
        found = reducer_block.read(config)
        reason = found and plugin.refusal(names[0], found.reducer)
    except UserError as error:
        reason = str(error)
    if reason:
        raise UserError(f"{model}: {reason}")
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "vlmcompress" not in plugins.split(","):
        raise UserError(f"{model} needs vLLM's plugin 'vlmcompress', which VLLM_PLUGINS='{plugins}' leaves out; add it")


def check_port(host: str, port: int) -> None:
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

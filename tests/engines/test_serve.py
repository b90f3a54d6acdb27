"""`serve`: the flags it finds for a checkpoint, and the real server asked by a real OpenAI client."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.engines.processes import session_ends
from tests.tiny import build
from vlmcompress.checkpoint import reducer_block
from vlmcompress.engines.vllm.serve import example, flags, serve
from vlmcompress.errors import UserError
from vlmcompress.recipe.reducer import parse


def test_flags(checkpoint: Path) -> None:
    found = flags(checkpoint, port=1234, max_model_len=512, extra=["--seed", "3"])
    assert found[0] == str(checkpoint)
    pairs = dict(zip(found[1::2], found[2::2], strict=True))
    assert pairs["--served-model-name"] == "tiny-vlm"
    assert (pairs["--port"], pairs["--max-model-len"]) == ("1234", "512")
    assert json.loads(pairs["--limit-mm-per-prompt"])["image"] == 4
    assert "--kv-cache-dtype" not in pairs
    assert found[-2:] == ["--seed", "3"]


def test_kv_scales_ask_for_an_fp8_cache(checkpoint: Path) -> None:
    config = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    found = flags(checkpoint)
    assert found[found.index("--kv-cache-dtype") + 1] == "fp8"


def test_bad_input(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint folder"):
        serve(tmp_path / "nothing")
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json can't be read"):
        serve(checkpoint)


@pytest.mark.parametrize(
    ("block", "plugins", "text"),
    [
        ({"schema": 99}, None, "this vlmcompress reads up to 1; upgrade it"),
        ({"reduce": {"method": "fastv", "keep": 0.5}}, None, "vLLM cannot serve 'fastv'"),
        ({}, "", "needs vLLM's plugin 'vlmcompress'"),
    ],
)
def test_a_reducer_that_would_be_refused(block, plugins, text, tmp_path: Path, monkeypatch) -> None:
    plain = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    config = reducer_block.write(plain, parse("dart:0.5"))
    (tmp_path / "config.json").write_text(json.dumps(config | {reducer_block.KEY: config[reducer_block.KEY] | block}))
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    with pytest.raises(UserError, match=text):
        serve(tmp_path)


def test_port_taken(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="can't be listened on .*choose another --port"):
            serve(checkpoint, port=taken.getsockname()[1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, int, Path, Path]]:
    folder = build("llava", tmp_path_factory.mktemp("serve") / "tiny-llava")
    port, log = free_port(), folder.parent / "log"
    code = f"from vlmcompress.engines.vllm.serve import serve; serve({str(folder)!r}, port={port})"
    with open(log, "wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=sink, stderr=sink, start_new_session=True)
    try:
        yield process, port, folder, log
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_up(process: subprocess.Popen, port: int, log: Path, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise AssertionError("the server did not come up: " + log.read_text()[-3000:])


@pytest.mark.engine
def test_openai_client_sends_an_image_and_gets_an_answer(server) -> None:
    """An OpenAI client, the printed curl command, then a clean stop that leaves no process of the session."""
    import openai

    process, port, folder, log = server
    wait_until_up(process, port, log)
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(buffer, "PNG")
    (folder.parent / "image.png").write_bytes(buffer.getvalue())
    address = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": address}}
    text = {"type": "text", "text": "what"}
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=5)

    def ask(*parts: dict):
        messages = [{"role": "user", "content": list(parts)}]
        return client.chat.completions.create(model="tiny-llava", messages=messages, max_tokens=4, temperature=0)

    with_image, without = ask(image, text), ask(text)
    assert with_image.usage.prompt_tokens == without.usage.prompt_tokens + 16  # a 4 x 4 grid
    assert 0 < with_image.usage.completion_tokens <= 4

    shell = example(folder, "127.0.0.1", port).split("\n", 1)[1]
    reply = subprocess.run(["bash", "-c", shell], cwd=folder.parent, capture_output=True, text=True, timeout=60)
    assert json.loads(reply.stdout)["usage"]["prompt_tokens"] > 16

    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM)
    assert session_ends(process.pid)

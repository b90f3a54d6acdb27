"""`serve`: the flags it finds for a checkpoint, and the real server with a real OpenAI client."""

from __future__ import annotations

import ast
import base64
import contextlib
import http.client
import io
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.kit.processes import folder_is_left
from tests.kit.tiny import build
from tests.kit.vllm_source import package
from vlmcompress import models
from vlmcompress.engines import EngineSettings, Request, get_engine
from vlmcompress.engines.vllm import ENGINE, ENVIRONMENT, PYTHON_VARIABLE, Installed
from vlmcompress.engines.vllm.serve import arguments_of, example, line_of, remarks, serve
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.utils.errors import UserError


def test_flags_reach_vllm(checkpoint: Path) -> None:
    arguments = arguments_of(checkpoint, port=1234, max_model_len=512, extra=["--seed", "3"])
    assert arguments[0] == str(checkpoint)
    pairs = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert pairs["--served-model-name"] == "tiny-vlm"
    assert (pairs["--port"], pairs["--max-model-len"]) == ("1234", "512")
    assert json.loads(pairs["--limit-mm-per-prompt"]) == {"image": 4, "video": 0}
    assert "--kv-cache-dtype" not in pairs
    assert arguments[-2:] == ["--seed", "3"]


def test_a_context_is_at_most_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM would refuse in 63 lines; contexts that it works out, or that a flag sets, are left to it."""
    text: dict[str, Any] = {"max_position_embeddings": 512}
    plain = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert "512" in arguments_of(tmp_path, max_model_len=512)
    with pytest.raises(
        UserError, match="^--max-model-len is 513, more than the model's context of 512 tokens; give 512 "
    ):
        arguments_of(tmp_path, max_model_len=513)
    with monkeypatch.context() as patched:
        patched.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        assert "513" in arguments_of(tmp_path, max_model_len=513)
    text["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert "513" in arguments_of(tmp_path, max_model_len=513)


def test_videos_are_off_by_default(checkpoint: Path) -> None:
    assert [
        line
        for line in remarks(arguments_of(checkpoint))
        if "Requests can have no videos; --videos-per-request N" in line
    ]
    arguments = arguments_of(checkpoint, videos=2)
    assert json.loads(arguments[arguments.index("--limit-mm-per-prompt") + 1])["video"] == 2
    assert remarks(arguments) == []
    assert remarks(arguments_of(checkpoint, extra=['--limit-mm-per-prompt={"video": 1}'])) == []


@given(st.sampled_from(["images", "videos", "max_model_len"]), st.integers())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_count_of_a_server_is_out_of_bounds(checkpoint: Path, name: str, count: int) -> None:
    with contextlib.suppress(UserError):
        arguments_of(checkpoint, **{name: count})
        assert 0 <= count <= 10**6


def test_a_server_that_others_reach_warns_of_what_it_fetches(checkpoint: Path) -> None:
    """One warning, where no flag names the hosts that images may come from; none for this machine alone."""
    warned = {
        host: sum(line.startswith("warning: ") for line in remarks(arguments_of(checkpoint, host=host, extra=extra)))
        for host, extra in (
            ("0.0.0.0", []),
            ("127.0.0.1", []),
            ("10.0.0.7", ["--allowed-media-domains", "example.org"]),
            ("::", ["--host", "localhost"]),
        )
    }
    assert warned == {"0.0.0.0": 1, "127.0.0.1": 0, "10.0.0.7": 0, "::": 0}


@pytest.mark.parametrize(
    ("reducer", "trusted"),
    [("dart:0.5,keep_max=1", True), ("dart:0.5", False)],
)
def test_clients_may_send_the_share_to_the_reducer(reducer: str, trusted: bool, tmp_path: Path) -> None:
    plain = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(reducer_block.config_with_reducer(plain, parse_reducer(reducer))))
    arguments = arguments_of(tmp_path, videos=1)
    assert ("--trust-request-mm-kwargs" in arguments) is trusted
    assert any("takes that only with --trust-request-mm-kwargs" in line for line in remarks(arguments)) is trusted
    refused = arguments_of(tmp_path, videos=1, extra=["--no-trust-request-mm-kwargs"])
    assert refused[-1] == "--no-trust-request-mm-kwargs" and remarks(refused) == []


def test_kv_scales_select_an_fp8_cache(checkpoint: Path) -> None:
    config = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    arguments = arguments_of(checkpoint)
    assert arguments[arguments.index("--kv-cache-dtype") + 1] == "fp8"


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3-5-moe", "llava"])
@pytest.mark.parametrize("shows", ["tools", "nothing", "another form"])
def test_requests_may_bring_tools_where_the_template_shows_them(family: str, shows: str, tmp_path: Path) -> None:
    """By the family's parser of vLLM's, where the template has its form; the user's flag wins."""
    folder, spec = build(family, tmp_path / family), models.REGISTRY.get(family).SPEC
    parser, mark = spec.engine.tool_calls or ("none", "<tool_call>")
    texts = {
        "tools": f"{{% if tools %}}{mark}{{% endif %}}",
        "nothing": mark,
        "another form": "{% if tools %}<call>{% endif %}",
    }
    (folder / "chat_template.jinja").write_text(texts[shows])
    arguments = arguments_of(folder)
    added = shows == "tools" and family != "llava"
    assert (arguments[-3:] == ["--enable-auto-tool-choice", "--tool-call-parser", parser]) is added
    assert any(f"whose calls '{parser}' reads" in line for line in remarks(arguments)) is added
    refused = arguments_of(folder, extra=["--no-enable-auto-tool-choice"])
    assert "--tool-call-parser" not in refused and refused[-1] == "--no-enable-auto-tool-choice"


def test_vllm_has_the_parsers() -> None:
    """Those of the version that is installed, from its source."""
    text = (package() / "tool_parsers/__init__.py").read_text()
    (table,) = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_TOOL_PARSERS_TO_REGISTER"
    ]
    parsers = {spec.engine.tool_calls[0] for spec in models.all_specs() if spec.engine.tool_calls}
    assert len(parsers) > 4 and parsers <= set(ast.literal_eval(table))


def test_the_printed_line_starts_the_same_server(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables that `serve` sets and the flag that its server adds, both on CPUs only."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")  # which the shell has, too
    arguments = arguments_of(checkpoint)
    for cpu in (True, False):
        monkeypatch.setattr("vlmcompress.engines.vllm.serve.installed", lambda cpu=cpu: Installed("0.32.0", cpu=cpu))
        words = shlex.split(line_of(arguments))
        start = words.index("vllm")
        set_here = dict(word.split("=", 1) for word in words[:start])
        assert set_here == {
            name: value
            for name, value in ENVIRONMENT.items()
            if name != "VLLM_NO_USAGE_STATS" and (cpu or not name.startswith("VLLM_CPU"))
        }
        assert words[start:] == ["vllm", "serve", *arguments, *(["--enforce-eager"] if cpu else [])]
    chosen = arguments_of(checkpoint, extra=["--no-enforce-eager"])
    monkeypatch.setattr("vlmcompress.engines.vllm.serve.installed", lambda: Installed("0.32.0", cpu=True))
    assert line_of(chosen).endswith("--no-enforce-eager")


FP8 = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}


@pytest.mark.parametrize(
    ("engine", "group", "expected"),
    [
        (Installed("0.32.0+cpu", cpu=True, reference_fp8=True), FP8, True),
        (Installed("0.32.0+cpu", cpu=True, reference_fp8=True, plugin=True), FP8, False),
        (Installed("0.33.0+cpu", cpu=True, reference_fp8=True), FP8, False),
        (Installed("0.32.0+cpu", cpu=True), FP8, False),
        (Installed("0.32.0", reference_fp8=True), FP8, False),
        (Installed("0.32.0+cpu", cpu=True, reference_fp8=True), {"weights": FP8["weights"] | {"type": "int"}}, False),
    ],
)
def test_slow_settings_warn(
    engine: Installed, group: dict, expected: bool, checkpoint: Path, monkeypatch, capsys
) -> None:
    """FP8 without the plugin on a processor where torch has a reference kernel only; before the engine starts."""
    config = {"quantization_config": {"config_groups": {"group_0": group}}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("vlmcompress.engines.vllm.installed", lambda: engine)
    monkeypatch.setenv(PYTHON_VARIABLE, "/bin/false")
    with pytest.raises(UserError, match="could not start"):
        ENGINE.answer(checkpoint, [Request("a", [])], media=checkpoint)
    line = "note: FP8 is slow in vLLM 0.32.0+cpu on this processor, which has AMX: its products take oneDNN's reference kernel"
    assert (line in capsys.readouterr().err) is expected


def test_bad_input_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint folder"):
        serve(tmp_path / "nothing")
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json is not readable"):
        serve(checkpoint)


@pytest.mark.parametrize(
    ("block", "plugins", "text"),
    [
        ({"schema": 99}, None, "this vlmcompress reads up to 1; upgrade it"),
        ({"reduce": {"method": "fastv", "keep": 0.5}}, None, "vLLM cannot serve 'fastv'"),
        ({"reduce": {"method": "learned", "scorer": "/etc/passwd"}}, None, "reduce.scorer is '/etc/passwd', should be"),
        ({}, "", "needs vLLM's plugin 'vlmcompress'"),
    ],
)
def test_an_unserved_reducer_is_refused_before_the_engine_starts(
    block, plugins, text, tmp_path: Path, monkeypatch
) -> None:
    plain = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    config = reducer_block.config_with_reducer(plain, parse_reducer("dart:0.5"))
    (tmp_path / "config.json").write_text(json.dumps(config | {reducer_block.KEY: config[reducer_block.KEY] | block}))
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    with pytest.raises(UserError, match=text):
        serve(tmp_path)


def test_a_taken_port_is_refused(checkpoint: Path) -> None:
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
def server(
    tmp_path_factory: pytest.TempPathFactory, quick_engines: None
) -> Iterator[tuple[subprocess.Popen, int, Path, Path]]:
    """A checkpoint whose reducer takes the share of a request, served by `serve`."""
    folder = build("llava", tmp_path_factory.mktemp("serve") / "tiny-llava")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(reducer_block.config_with_reducer(config, parse_reducer("dart:0.5,keep_max=0.75")))
    )
    port, log = free_port(), folder.parent / "log"
    code = f"from vlmcompress.engines.vllm.serve import serve; serve({str(folder)!r}, port={port})"
    with open(log, "wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=sink, stderr=sink, cwd=folder.parent)
    try:
        yield process, port, folder, log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_up(process: subprocess.Popen, port: int, log: Path, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-12000:]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise AssertionError("the server did not come up: " + log.read_text()[-12000:])


@pytest.mark.engine
def test_openai_client_sends_an_image_and_gets_an_answer(server) -> None:
    """An OpenAI client, with a share for the reducer, too; the engine `openai:`; the printed curl command; then a clean stop
    that leaves no process."""
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

    def ask(*parts: dict, **extra_body: Any):
        messages = [{"role": "user", "content": list(parts)}]
        settings = {"max_tokens": 4, "temperature": 0, "extra_body": extra_body}
        return client.chat.completions.create(model="tiny-llava", messages=messages, **settings)

    with_image, without = ask(image, text), ask(text)
    assert with_image.usage.prompt_tokens == without.usage.prompt_tokens + 8  # half of a 4 x 4 grid
    assert 0 < with_image.usage.completion_tokens <= 4
    assert "only with --trust-request-mm-kwargs" in log.read_text()

    counts = {
        keep: ask(image, text, mm_processor_kwargs={"keep": keep}).usage.prompt_tokens for keep in (0.25, 5, 0.75)
    }
    assert {keep: count - without.usage.prompt_tokens for keep, count in counts.items()} == {0.25: 4, 5: 5, 0.75: 12}
    for keep in (0, -0.5, 0.8, 1.5, "half", True, [0.5], None, 10**400):
        with pytest.raises(
            openai.BadRequestError, match="'keep' must be a share above 0 and at most 0.75, or a number of"
        ):
            ask(image, text, mm_processor_kwargs={"keep": keep})

    # Images that nobody can use: the client's fault, so that the connection, which a proxy may share, stays open.
    huge = io.BytesIO()
    Image.new("1", (14_000, 14_000)).save(huge, "PNG")
    bombs = "data:image/png;base64," + base64.b64encode(huge.getvalue()).decode()
    link = http.client.HTTPConnection("127.0.0.1", port)
    for bad in ("data:,", "file:///etc/passwd", bombs):
        parts = [{"type": "image_url", "image_url": {"url": bad}}, text]
        body = {"model": "tiny-llava", "messages": [{"role": "user", "content": parts}]}
        link.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = link.getresponse()
        assert reply.status == 400 and reply.read() and link.sock is not None, bad[:30]

    request = Request("plain", [{"role": "user", "content": [text]}])
    run = get_engine(f"openai:http://127.0.0.1:{port}/v1").answer(
        "tiny-llava", [request], media=folder.parent, settings=EngineSettings(max_tokens=4, logprobs=5)
    )
    answer = run.answers["plain"]
    assert answer.text == without.choices[0].message.content and answer.prompt_tokens == without.usage.prompt_tokens
    assert answer.first and all(logprob <= 0 for logprob in answer.first.values())

    shell = example(folder, "127.0.0.1", port).split("\n", 1)[1]
    reply = subprocess.run(["bash", "-c", shell], cwd=folder.parent, capture_output=True, text=True, timeout=300)
    assert json.loads(reply.stdout)["usage"]["prompt_tokens"] > 8

    process.send_signal(signal.SIGTERM)
    assert process.wait(300) in (0, -signal.SIGTERM), log.read_text()[-12000:]
    assert folder_is_left(folder.parent)

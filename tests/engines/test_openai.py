"""The OpenAI engine against a server that misbehaves; `test_agreement` asks the real one."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlmcompress.engines import EngineSettings, Request, Run, get_engine, openai
from vlmcompress.engines.vllm.worker import with_frames
from vlmcompress.utils.errors import UserError

Reply = tuple[int, str] | None  # None: hang up
GOOD = {
    "choices": [{"message": {"role": "assistant", "content": "red"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


class Server(ThreadingHTTPServer):
    """Answers chat completions with `reply(body)` and keeps the requests; knows the models `small` and `large`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: Reply = (200, json.dumps({"data": [{"id": "small"}, {"id": "large"}]}))
        self.reply: Callable[[dict], Reply] = lambda _: (200, json.dumps(GOOD))
        self.asked: list[dict] = []

    @property
    def engine(self) -> openai.OpenAI:
        return openai.OpenAI.at(f"http://127.0.0.1:{self.server_port}")


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send(self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.send(self.server.reply(body))

    def send(self, reply: Reply) -> None:
        if reply is None:
            self.close_connection = True
            return
        self.send_response(reply[0])
        self.send_header("Content-Length", str(len(reply[1].encode())))
        self.end_headers()
        self.wfile.write(reply[1].encode())

    def log_message(self, *_) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(openai, "RETRIES", 2)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def ask(server: Server, folder: Path, count: int = 1, model: str = "small", **settings) -> Run:
    requests = [Request(f"q{i}", [{"role": "user", "content": f"what {i}"}]) for i in range(count)]
    return server.engine.answer(model, requests, media=folder, settings=EngineSettings(**settings))


def test_a_proxy_is_for_other_machines(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that names one reaches a server on this machine all the same, without `no_proxy`."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ask(server, tmp_path).answers["q0"].text == "red"


def test_a_server_answers(server: Server, tmp_path: Path) -> None:
    """What is sent, with the very bytes of picture and video, and what is made of the reply."""
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a b.png")
    (tmp_path / "c.mp4").write_bytes(b"film")
    picture = {"type": "image_url", "image_url": {"url": (tmp_path / "a b.png").as_uri()}}
    video = {"type": "video_url", "video_url": {"url": (tmp_path / "c.mp4").as_uri()}}
    (tmp_path / "d.frames").write_text("Zg==,Zw==")
    frames = {"type": "video_url", "video_url": {"url": (tmp_path / "d.frames").as_uri()}}
    first = [{"token": "red", "logprob": -0.1}, {"token": "blue", "logprob": -3.0}]
    logprobs = {"content": [{"token": "red", "logprob": -0.1, "top_logprobs": first}]}
    server.reply = lambda _: (200, json.dumps(GOOD | {"choices": [GOOD["choices"][0] | {"logprobs": logprobs}]}))
    content = [picture, {"type": "text", "text": "what"}, video, frames]
    request = Request("q", [{"role": "user", "content": content}], max_tokens=5, keep=0.5)
    arrived: list[str] = []
    run = server.engine.answer("small", [request], media=tmp_path, settings=EngineSettings(logprobs=2),
                               on_answer=lambda answer: arrived.append(answer.id))  # fmt: skip
    answer = run.answers["q"]
    assert (answer.text, answer.finish, answer.prompt_tokens, answer.output_tokens) == ("red", "stop", 7, 2)
    assert answer.first == {"red": -0.1, "blue": -3.0} and arrived == ["q"]
    (body,) = server.asked
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_logprobs"]) == ("small", 5, 0.0, 2)
    assert body["mm_processor_kwargs"] == {"keep": 0.5}
    sent, text, filmed, listed = body["messages"][0]["content"]
    assert listed == {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,Zg==,Zw=="}}
    assert with_frames(copy.deepcopy(request.messages))[0]["content"] == [
        *content[:3],
        listed,
    ]  # our vLLM gets the same
    assert filmed == {
        "type": "video_url",
        "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(b'film').decode()}"},
    }
    kind, _, data = sent["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data) == (tmp_path / "a b.png").read_bytes()
    assert text == {"type": "text", "text": "what"}


def test_requests_in_flight_are_limited(server: Server, tmp_path: Path) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def reply(_: dict) -> Reply:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.1)
        with lock:
            inside -= 1
        return 200, json.dumps(GOOD)

    server.reply = reply
    assert len(ask(server, tmp_path, count=12, max_num_seqs=3).answers) == 12
    assert most == 3


@pytest.mark.parametrize("trouble", [(503, "busy"), (500, ""), None], ids=["503", "500", "hang-up"])
def test_passing_errors_are_retried(server: Server, tmp_path: Path, trouble: Reply) -> None:
    replies = iter([trouble, trouble])
    server.reply = lambda _: next(replies, (200, json.dumps(GOOD)))
    assert ask(server, tmp_path).answers["q0"].text == "red"
    assert len(server.asked) == 3


REFUSALS = {
    "not-json": ((200, "<html>welcome</html>"), "gave no chat completion for sample 'q0' but: <html>welcome</html>"),
    "empty": ((200, ""), "gave no chat completion for sample 'q0' but: nothing"),
    "no-choices": ((200, '{"choices": []}'), """for sample 'q0' but: {"choices": []}"""),
    "null": ((200, "null"), "for sample 'q0' but: null"),
    "no-text": ((200, '{"choices": [{"message": {"content": 7}}]}'), "for sample 'q0' but: "),
    "long": ((200, "x" * 999), f"but: {'x' * 200}"),
    "refused": (
        (400, '{"error": {"message": "maximum context length is 8"}}'),
        "sample 'q0' can't be answered by small at http://.*: HTTP 400: maximum context length is 8",
    ),
    "key": ((401, "who are you?"), "HTTP 401: who are you\\?; set OPENAI_API_KEY"),
    "broken": ((503, "gone fishing"), "sample 'q0' .*HTTP 503: gone fishing"),
    "hang-up": (None, "http://.* can't be reached any more, at sample 'q0'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_answers_name_the_sample(server: Server, tmp_path: Path, case: str) -> None:
    reply, message = REFUSALS[case]
    server.reply = lambda _: reply
    pattern = message if reply is None or reply[0] != 200 else message.replace("[", "\\[").replace("{", "\\{")
    with pytest.raises(UserError, match=f"{pattern}$" if case == "long" else pattern) as caught:
        ask(server, tmp_path)
    assert "\n" not in str(caught.value)


def test_one_refusal_does_not_end_the_run(server: Server, tmp_path: Path) -> None:
    """As long as no more are refused than the settings allow; what concerns all requests ends it at once."""

    def reply(body: dict) -> Reply:
        bad = "what 2" in json.dumps(body)
        return (400, '{"error": {"message": "no such image"}}') if bad else (200, json.dumps(GOOD))

    server.reply = reply
    answers = ask(server, tmp_path, count=5, refusals=1).answers
    assert [name for name, answer in answers.items() if answer.refused] == ["q2"] and len(answers) == 5
    assert answers["q2"].refused == "HTTP 400: no such image"
    server.reply = lambda _: (401, "who are you?")
    with pytest.raises(UserError, match="HTTP 401"):
        ask(server, tmp_path, count=5, refusals=5)


def test_no_content_is_an_empty_answer(server: Server, tmp_path: Path) -> None:
    """Of a refusal, a tool call, or a reasoning parser that took all tokens; the reason why it ended is kept."""
    message = {"role": "assistant", "content": None, "reasoning_content": "Let me see"}
    choice = {"message": message, "finish_reason": "length"}
    server.reply = lambda body: (200, json.dumps(GOOD | {"choices": [choice]} if "what 1" in str(body) else GOOD))
    answers = ask(server, tmp_path, count=3).answers
    assert [(answer.text, answer.finish) for answer in (answers["q0"], answers["q1"])] == [
        ("red", "stop"),
        ("", "length"),
    ]


ADDRESS = st.text(st.sampled_from("http:/[]@1avé.。 \n%#?"), max_size=16)


@pytest.mark.parametrize(
    "address",
    [
        "http://[::1",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:0",
        "http://h:x",
        "h:1",
        "http://[v1.x]",
        "http://ä.。x",
    ],
)
def test_wrong_addresses_are_refused(address: str) -> None:
    with pytest.raises(UserError, match="is not the address of a server; write openai:http://localhost:8000"):
        get_engine(f"openai:{address}")


@given(ADDRESS | ADDRESS.map(lambda text: f"http://{text}"))
def test_any_address_is_taken_or_refused(address: str) -> None:
    with contextlib.suppress(UserError):
        import httpx

        assert httpx.URL(get_engine(f"openai:{address}").url).host


def test_silence_times_out(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other requests under way end with it."""
    monkeypatch.setattr(openai, "RETRIES", 0)
    gate = threading.Event()
    server.reply = lambda body: (gate.wait(30), (200, json.dumps(GOOD)))[1]
    began = time.monotonic()
    with pytest.raises(UserError, match="gave no answer to sample 'q.' for 1 s"):
        ask(server, tmp_path, count=3, answer_timeout=1)
    assert time.monotonic() - began < 25
    gate.set()


def test_server_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "RETRIES", 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(UserError, match=f"no server answers at {url}/v1 .*; is it up?"):
        get_engine(f"openai:{url}").answer("small", [Request("q", [])], media=tmp_path)


def test_model_not_served(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not serve 'smal'; did you mean 'small'?"):
        ask(server, tmp_path, model="smal")
    server.models = (200, "<html>")
    with pytest.raises(UserError, match="/models is no list of models; is this an OpenAI-compatible server?"):
        ask(server, tmp_path)
    server.models = (404, "")
    assert ask(server, tmp_path).answers["q0"].text == "red"
    assert len(server.asked) == 1


@pytest.mark.parametrize("address", ["https://example.com/a.png", "file:///etc/hostname"])
def test_images_from_elsewhere_are_not_sent(server: Server, tmp_path: Path, address: str) -> None:
    request = Request("q", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}])
    with pytest.raises(UserError, match=f"sample 'q': {address} is not a file in "):
        server.engine.answer("small", [request], media=tmp_path)
    assert not server.asked

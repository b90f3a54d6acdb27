"""The client's clock, against a server whose times are known."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vlmcompress.evaluation.speed.client import encode_request, parse_load, send

pytest.importorskip("aiohttp")
FIRST, GAP = 0.15, 0.06  # seconds


class Clockwork(BaseHTTPRequestHandler):
    """Streams like vLLM: an empty chunk with the role, three chunks with 1, 2 and 1 tokens, the usage. The request's text
    says what goes wrong."""

    running = most = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        problem = body["messages"][0]["content"]
        with self.lock:
            Clockwork.running += 1
            Clockwork.most = max(Clockwork.most, Clockwork.running)
        try:
            if problem == "refuse":
                self.send_error(400, "no such thing")
                return
            self.send_response(200)
            self.end_headers()
            self.stream(problem)
        finally:
            with self.lock:
                Clockwork.running -= 1

    def stream(self, problem: str) -> None:
        self.chunk(choices=[{"delta": {"role": "assistant"}}], usage=self.usage(0))
        if problem == "vanish":
            self.connection.close()
            return
        if problem == "error":
            self.chunk(error={"message": "engine died"})
            return
        for wait, tokens in () if problem == "nothing" else ((FIRST, 1), (GAP, 3), (GAP, 4)):
            time.sleep(wait)
            self.chunk(choices=[{"delta": {"content": "a"}}], usage=self.usage(tokens))
        details = {"multimodal_tokens": {"image": 81}}
        self.chunk(choices=[], usage=self.usage(0 if problem == "nothing" else 4) | {"prompt_tokens_details": details})
        self.wfile.write(b"data: [DONE]\n\n")

    def usage(self, tokens: int) -> dict:
        return {"prompt_tokens": 94, "completion_tokens": tokens}

    def chunk(self, **content) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Clockwork)
    server.daemon_threads = True
    Clockwork.running = Clockwork.most = 0
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def body(text: str = "") -> bytes:
    return encode_request("model", [{"role": "user", "content": text}], 4)


def in_the_end(check: Callable[[], None]) -> None:
    """Check times several times: a busy machine delays some attempts, a wrong clock is wrong in all of them."""
    for _ in range(9):
        with contextlib.suppress(AssertionError):
            return check()
    check()


def test_a_request_is_encoded() -> None:
    request = json.loads(body("hi"))
    assert (request["max_completion_tokens"], request["temperature"], request["ignore_eos"]) == (4, 0, True)
    assert request["stream"] and request["stream_options"]["include_usage"]


def test_times_and_tokens(url: str) -> None:
    """The role chunk is no token, a chunk of two tokens is two gaps, and the server's counts are taken over."""

    def check() -> None:
        (outcome,), duration = send(url, [body()], parse_load("closed:1"))
        assert outcome.error == ""
        assert outcome.ttft == pytest.approx(FIRST, abs=0.04)
        assert outcome.e2e == pytest.approx(FIRST + 2 * GAP, abs=0.06)
        assert outcome.itl == pytest.approx([GAP / 2, GAP / 2, GAP], abs=0.03)
        assert sum(outcome.itl) == pytest.approx(outcome.e2e - outcome.ttft)
        assert outcome.tpot == pytest.approx((outcome.e2e - outcome.ttft) / 3)
        assert (outcome.prompt_tokens, outcome.visual_tokens, outcome.output_tokens) == (94, 81, 4)
        assert outcome.e2e <= duration < 1

    in_the_end(check)


def test_closed_load_keeps_so_many_in_flight(url: str) -> None:

    def check() -> None:
        counts: list[int] = []
        outcomes, duration = send(url, [body()] * 9, parse_load("closed:3"), done=counts.append)
        assert [outcome.error for outcome in outcomes] == [""] * 9
        assert Clockwork.most == 3
        assert counts == list(range(1, 10))
        assert duration == pytest.approx(3 * (FIRST + 2 * GAP), abs=0.3)

    in_the_end(check)


def test_open_load_counts_from_the_moment_a_request_is_due(url: str) -> None:
    load = parse_load("rate:40")
    arrivals = load.arrivals(12, seed=1)
    assert arrivals is not None

    def check() -> None:
        outcomes, duration = send(url, [body()] * 12, load, seed=1)
        assert duration == pytest.approx(arrivals[-1] + FIRST + 2 * GAP, abs=0.15)
        assert Clockwork.most > 3
        assert all(FIRST <= outcome.ttft < FIRST + 0.1 for outcome in outcomes)

    in_the_end(check)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("refuse", "HTTP 400"),
        ("vanish", "no tokens|Error"),
        ("error", "engine died"),
        ("nothing", "the stream had no tokens"),
    ],
)
def test_a_failure_is_an_outcome(url: str, problem: str, message: str) -> None:
    bad, good = send(url, [body(problem), body()], parse_load("closed:1"))[0]
    assert good.error == ""
    assert re.search(message, bad.error)


def test_timeout_and_absent_server(url: str) -> None:
    assert "TimeoutError" in send(url, [body()], parse_load("closed:1"), timeout=0.1)[0][0].error
    assert "Connect" in send("http://127.0.0.1:9", [body()], parse_load("closed:1"))[0][0].error

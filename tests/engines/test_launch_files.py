"""Launch files in vLLM itself: its parser reads every line, and its servers start by them and answer."""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.kit import forks, launching, rtn
from tests.kit.engine import asked
from tests.kit.places import DEMO_LLAVA, DEMOS, ROOT
from tests.kit.processes import session_ends
from vlmcompress.engines.vllm import environment
from vlmcompress.export import launch
from vlmcompress.export.launch import containers
from vlmcompress.models.data.sources import load_samples
from vlmcompress.reduction.choice import parse_reducer

pytestmark = pytest.mark.engine
PROGRAMS = Path(sys.executable).parent

FIELDS = ["served_model_name", "max_model_len", "limit_mm_per_prompt", "enable_prefix_caching", "kv_cache_dtype"]
FIELDS += ["max_num_batched_tokens", "mm_encoder_only", "attention_backend"]


def test_vllm_accepts_every_flag_of_the_launch_files(tmp_path: Path) -> None:
    """Its own parser takes the flags of each script and container for what they are meant to be; those of a checkpoint without
    a target become a whole configuration of the engine."""
    lines = []
    cases = {"fp8": "a100", "int8": "b200", "bf16": None}
    for form, machine in cases.items():
        checkpoint = launching.facts(form, machine=machine, weights=10**9, name="demo")
        serving = launching.written(tmp_path / form, checkpoint)
        lines.append(launching.called(serving / "vllm.sh")[1][1:])
        roles = ("encode", "prefill-decode", "prefill", "decode")
        lines += [launching.called(serving / "vllm-split.sh", role, STORE=str(tmp_path))[1][1:] for role in roles]
        lines.append([str(tmp_path), *containers.arguments(checkpoint)[3:]])
    lines = [[str(DEMO_LLAVA), *flags[1:]] for flags in lines]
    per_case = len(lines) // len(cases)
    job = {"lines": lines, "fields": FIELDS, "whole": [len(lines) - per_case]}
    (parsed,) = asked("flags", [job])
    assert "error" not in parsed, parsed
    for number, namespace in enumerate(parsed["parsed"]):
        form, encoding = list(cases)[number // per_case], number % per_case == 1
        assert namespace["served_model_name"] in ("'demo'", "['demo']") and namespace["max_model_len"] == "-1"
        assert namespace["limit_mm_per_prompt"] == "{'image': 4, 'video': 0}"
        assert namespace["enable_prefix_caching"] == str(not encoding) and namespace["mm_encoder_only"] == str(encoding)
        assert namespace["kv_cache_dtype"] == ("'fp8'" if form == "fp8" and not encoding else "'auto'")
        assert namespace["max_num_batched_tokens"] == ("114688" if encoding else "None")
        assert ("FLASHINFER" in namespace["attention_backend"]) is (form == "fp8" and not encoding)


# vLLM's own command and lm-eval's models of vLLM, in a process that has imported the engine.
COMMANDS = """
import importlib, io, json, contextlib, runpy, sys
said = {}
for words in json.loads(sys.argv[-1]):
    sys.argv[:] = ["vllm", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(PROGRAM, run_name="__main__")
        except SystemExit as end:
            said[" ".join(words)] = [end.code or 0, out.getvalue()[:2000]]
for name in ("vllm_causallms", "vllm_vlms"):
    importlib.import_module(f"lm_eval.models.{name}")
print("SAID", json.dumps(said))
"""


def test_the_vllm_command_and_lm_eval_start() -> None:
    """Both ask for the version of a distribution `vllm`, which the CPU build's is not called (`scripts/name_vllm.py`)."""
    words = [["--version"], ["serve", "--help"]]
    code = COMMANDS.replace("PROGRAM", repr(str(PROGRAMS / "vllm")))
    done = subprocess.run(
        [forks.python(*forks.VLLM), "-c", code, json.dumps(words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    printed = json.loads(line.removeprefix("SAID "))
    assert {words: code for words, (code, _) in printed.items()} == dict.fromkeys(map(" ".join, words), 0)
    assert printed["--version"][1].strip() == importlib.metadata.version("vllm")
    assert "usage: vllm serve" in printed["serve --help"][1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in INT8 with half of its visual tokens, in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("launched") / "demo reduced"
    rtn.write(DEMO_LLAVA, folder, rtn.SCHEMES["int8"], reducer=parse_reducer("divprune:0.5"))
    return folder


@contextlib.contextmanager
def running(checkpoint: Path, script: str, *arguments: str, **variables: str) -> Iterator[str]:
    """The address of a server that a launch file starts by the `vllm` of this environment. Compiling the model takes minutes
    on a CPU, so it is left out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = {
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    log = checkpoint.parent / f"{script}{len(arguments)}{port}.log"
    command = ["sh", str(checkpoint / "serve" / script), *arguments, "--enforce-eager"]
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command,
            env=environment(PORT=str(port), **variables) | path,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 600
    try:
        while not healthy(address):
            assert child.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        if not session_ends(child.pid, 60):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def healthy(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=30).status == 200
    except OSError:
        return False


def ask(address: str, image: Image.Image, question: str, tokens: int = 8) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {"model": "demo-reduced", "max_tokens": tokens, "temperature": 0}
    content = json.dumps(body | {"messages": [{"role": "user", "content": parts}]}).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", content, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=300).read())


def answer(reply: dict[str, Any]) -> str:
    return reply["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def pictures() -> tuple[str, list[Image.Image]]:
    """A question of the demo's world, and pictures with different answers to it."""
    by_question: dict[str, dict[str, Image.Image]] = {}
    for sample in load_samples(DEMOS / "data" / "llava" / "test.parquet", samples=None, seed=0):
        if len(sample.images) == 1:
            by_question.setdefault(sample.question, {}).setdefault(sample.answer, sample.images[0])
    question = max(by_question, key=lambda question_id: len(by_question[question_id]))
    return question, list(by_question[question].values())[:6]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, pictures) -> list[str]:
    """Answers of one server, started by the script with speculative decoding."""
    question, images = pictures
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    with running(checkpoint, "vllm.sh", "--speculative-config", json.dumps(ngram)) as address:
        replies = [ask(address, image, question) for image in images]
        metrics = urllib.request.urlopen(f"{address}/metrics").read().decode()
    assert "vllm:spec_decode_num_drafts_total" in metrics
    assert {reply["model"] for reply in replies} == {"demo-reduced"}
    assert {reply["usage"]["prompt_tokens"] for reply in replies} <= set(range(41, 81))  # 41 of 81 are kept
    return [answer(reply) for reply in replies]


@pytest.mark.slow
def test_the_launch_script_serves(alone: list[str]) -> None:
    """The answers are the model's: not all the same."""
    assert len(set(alone)) > 1 and all(alone)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_separated_stages_answer_as_one_server(checkpoint: Path, pictures, alone: list[str], tmp_path: Path) -> None:
    """Encoder and language model in two servers answer as one server does. The second answers by what the first stored: given
    another picture's encoding, it answers about that one."""
    question, images = pictures
    first, other = 0, next(number for number, text in enumerate(alone) if text != alone[0])
    store = tmp_path / "store"
    with (
        running(checkpoint, "vllm-split.sh", "encode", STORE=str(store)) as encoder,
        running(checkpoint, "vllm-split.sh", "prefill-decode", STORE=str(store)) as decoder,
    ):
        folders = []
        for number in (first, other):
            encoded = set(store.rglob("*.safetensors"))
            ask(encoder, images[number], question, tokens=1)
            (new,) = set(store.rglob("*.safetensors")) - encoded
            folders.append(new)
        assert answer(ask(decoder, images[other], question)) == alone[other]
        folders[0].write_bytes(folders[1].read_bytes())
        assert answer(ask(decoder, images[first], question)) == alone[other]
    assert launch.launch_problem("vllm-split", launching.facts(reducer="blind")) is None

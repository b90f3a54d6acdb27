"""The same questions in vLLM, in transformers and over a served vLLM: each is the others' oracle.

The demo model answers nearly all of them surely; BF16 in another order of additions may tip one over.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.kit import rtn
from tests.kit.places import DEMOS
from tests.kit.processes import session_ends, session_members
from vlmcompress.engines import Answer, EngineSettings, Request, Run, get_engine
from vlmcompress.engines.hf import ENGINE as HF
from vlmcompress.engines.vllm import PYTHON_VARIABLE
from vlmcompress.models.data.sources import load_samples
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.utils.errors import UserError

MODEL = DEMOS / "demo-llava"
SETTINGS = EngineSettings(max_tokens=8, logprobs=5)
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Request], Path]:
    """A question of each of eight families, with one image, two or none, and the folder of their images."""
    media = tmp_path_factory.mktemp("media")
    samples = load_samples(DEMOS / "data" / "llava" / "test.parquet", samples=None, seed=0)
    families = {sample.family or "": sample for sample in samples}
    requests = []
    for family in sorted(families)[-8:]:
        content = []
        for at, image in enumerate(families[family].images):
            file = media / f"{family} {at}.png"
            image.save(file)
            content.append({"type": "image_url", "image_url": {"url": file.as_uri()}})
        content.append({"type": "text", "text": families[family].question})
        requests.append(Request(family, [{"role": "user", "content": content}]))
    assert {request.images() for request in requests} == {0, 1, 2}
    return requests, media


@pytest.fixture(scope="module")
def transformers(questions, quick_engines) -> Run:
    requests, media = questions
    return get_engine("hf").answer(MODEL, requests, media=media, settings=SETTINGS)


def agree(run: Run, other: Run) -> None:
    """At least 7 of 8 texts are equal; prompts and their lengths are; first tokens are about as likely."""
    assert list(sorted(run.answers)) == sorted(other.answers) and len(run.answers) == 8
    pairs = [(answer, other.answers[name]) for name, answer in run.answers.items()]
    assert sum(a.text.strip() == b.text.strip() for a, b in pairs) >= 7
    assert [a.prompt_tokens for a, _ in pairs] == [b.prompt_tokens for _, b in pairs]
    assert sum((a.finish, a.output_tokens) == (b.finish, b.output_tokens) for a, b in pairs) >= 7
    for a, b in pairs:
        assert a.first and b.first
        token, logprob = next(iter(a.first.items()))
        assert math.exp(logprob) == pytest.approx(math.exp(b.first[token]), abs=0.05)


def test_transformers_flags_cut_answers_and_gives_probabilities(transformers: Run) -> None:
    """Cut answers are marked as such; the probabilities are those of a distribution."""
    assert transformers.engine["name"] == "hf" and transformers.engine["restarts"] == 0
    for answer in transformers.answers.values():
        assert answer.finish == "stop" and 0 < answer.output_tokens < 8 and answer.first is not None
        assert len(answer.first) <= 5 and sum(map(math.exp, answer.first.values())) <= 1.0001


WORDS = "what is this " * 2000


def answers_before_a_refused_request(engine: str, model: Path, questions, settings: EngineSettings) -> Run:
    """What an engine answers when the last request is too long: that one is named, and those before it are answered first."""
    parts = [part for request in questions[0] for part in request.messages[0]["content"]]
    image = next(part for part in parts if part["type"] == "image_url")
    # With more images than any other, so that transformers, which takes prompts with equally many together, takes it last.
    long = Request("long", [{"role": "user", "content": [image, image, image, {"type": "text", "text": WORDS}]}])
    answers: dict[str, Answer] = {}
    with pytest.raises(UserError, match="sample 'long' can't be answered.*maximum context length is 2048"):
        get_engine(engine).answer(
            model,
            [*questions[0], long],
            media=questions[1],
            settings=settings,
            on_answer=lambda answer: answers.update({answer.id: answer}),
        )
    return Run(answers, {}, 0.0)


@pytest.mark.slow
def test_vllm_answers_as_transformers_does(questions, transformers: Run) -> None:
    agree(answers_before_a_refused_request("vllm", MODEL, questions, SETTINGS), transformers)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed") / "demo-llava-int8"
    rtn.write(MODEL, folder, rtn.SCHEMES["int8"])
    return folder


def test_transformers_reads_compressed_checkpoints(questions, transformers: Run, compressed: Path) -> None:
    """INT8 weights and activations answer as BF16 does, one request at a time and each with a limit of its own."""
    run = answers_before_a_refused_request("hf", compressed, questions, EngineSettings(max_tokens=8, max_num_seqs=1))
    same = [answer.text == transformers.answers[name].text for name, answer in run.answers.items()]
    assert len(same) == 8 and sum(same) >= 7
    assert all(answer.first is None for answer in run.answers.values())


def test_transformers_refuses_missing_weights(questions, compressed: Path) -> None:
    file = compressed / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in sorted(tensors) if name.endswith("q_proj.weight_scale"))]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="transformers could not load .*lacks 1 tensors .*q_proj.weight_scale"):
        get_engine("hf").answer(compressed, questions[0], media=questions[1])


HOLD = """
import sys, time
from vlmcompress.engines.vllm.serve import vllm_server
with vllm_server(sys.argv[1], flags=["--max-num-seqs", "8"]) as running:
    print(running.url, running.name, running.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def held() -> Iterator[tuple[subprocess.Popen, str, str, int]]:
    """A real server, held by a process of its own."""
    variables = {name: value for name, value in os.environ.items() if name != PYTHON_VARIABLE}
    python = Path(sys.prefix, "bin", "python")  # `sys.executable` is a fork, whose server has no session of its own
    command = [str(python), "-c", HOLD, str(MODEL)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    assert holder.stdout is not None
    try:
        url, name, pid = holder.stdout.readline().split()
        yield holder, url, name, int(pid)
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.slow
def test_a_served_model_answers_as_transformers_does(questions, transformers: Run, held) -> None:
    """Then the holder of the server is killed with `kill -9`, and nothing of the server is left."""
    holder, url, name, pid = held
    requests, media = questions
    assert name == "demo-llava" and len(session_members(pid)) > 1
    run = get_engine(f"openai:{url}").answer(name, requests, media=media, settings=SETTINGS)
    agree(run, transformers)
    long = Request("long", [{"role": "user", "content": WORDS}])
    with pytest.raises(UserError, match="sample 'long' can't be answered.*HTTP 400: .*maximum context length"):
        get_engine(f"openai:{url}").answer(name, [long], media=media)
    holder.send_signal(signal.SIGKILL)
    assert session_ends(pid)


@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_killed_engine_continues(questions, transformers: Run, name: str) -> None:
    """`kill -9` after the first answer: a second process answers the rest, and nothing is answered twice."""
    requests, media = questions
    # So many that they are not all answered before the signal arrives.
    requests = requests + [replace(request, id=f"{request.id} {turn}") for turn in range(6) for request in requests]
    arrived: list[str] = []

    def kill_once(answer) -> None:
        arrived.append(answer.id)
        if len(arrived) == 1:
            os.kill(worker(), signal.SIGKILL)

    settings = EngineSettings(max_tokens=8, max_num_seqs=1, logprobs=5)
    run = get_engine(name).answer(MODEL, requests, media=media, settings=settings, on_answer=kill_once)
    assert run.engine["restarts"] == 1
    assert sorted(arrived) == sorted(request.id for request in requests)
    agree(replace(run, answers={name: run.answers[name] for name in transformers.answers}), transformers)


def worker() -> int:
    """The process id of this process's only living worker."""
    workers = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            command = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and b"engines/worker.py" in command:
            workers.append(int(stat.parent.name))
    assert len(workers) == 1
    return workers[0]


def test_reduced_answers_count_the_tokens_that_are_left(questions, transformers, tmp_path, capsys) -> None:
    """A reducer attached by name, and one that the checkpoint carries, whose share requests set: equal answers and counts."""
    sharing = [replace(request, id=f"{request.id} at 1/4", keep=0.25) for request in questions[0]]
    attached = replace(HF, reduce="uniform:0.25").answer(MODEL, sharing, media=questions[1], settings=SETTINGS)
    assert "has no reducer with keep_max: what the data have under 'keep' is left out" in capsys.readouterr().err
    shutil.copytree(MODEL, tmp_path / "reduced")
    config = tmp_path / "reduced" / "config.json"
    carried = parse_reducer("uniform:0.5,keep_max=1")
    config.write_text(json.dumps(reducer_block.config_with_reducer(json.loads(config.read_text()), carried)))
    requests = [*questions[0], *sharing, replace(questions[0][0], id="no share", keep=[0.25])]
    settings = replace(SETTINGS, refusals=1)
    run = get_engine("hf").answer(tmp_path / "reduced", requests, media=questions[1], settings=settings)
    assert "'keep' must be a share" in (run.answers["no share"].refused or "") and not run.engine["restarts"]
    assert (run.engine["reduce"], attached.engine["reduce"]) == (str(carried), "uniform:0.25")
    assert transformers.engine["reduce"] is None
    assert {request.id: run.answers[request.id] for request in sharing} == attached.answers
    for request in questions[0]:
        full, less = transformers.answers[request.id], run.answers[request.id]
        assert full.visual_tokens == 81 * request.images() and less.visual_tokens == 41 * request.images()
        assert full.prompt_tokens - less.prompt_tokens == 40 * request.images()

"""The parent's side of the engine process, first with interpreters that misbehave, then with the real engine."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.kit.processes import alive, wait_until_gone
from tests.kit.tiny import build
from vlmcompress.engines import Answer, EngineSettings, Request
from vlmcompress.engines.local import LOG_VARIABLE, last_words, stop_process
from vlmcompress.engines.vllm import ENGINE, PYTHON_VARIABLE
from vlmcompress.utils.errors import UserError

ASK = [Request("only", [{"role": "user", "content": "hello"}])]


def ask(tmp_path: Path, **settings):
    return ENGINE.answer("some/model", ASK, media=tmp_path, settings=EngineSettings(**settings))


def test_missing_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(UserError, match="VLMCOMPRESS_ENGINE_PYTHON=/nowhere/python is not an executable"):
        ask(tmp_path)


def test_a_log_in_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before the engine starts."""
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "logs" / "engine.log"))
    with pytest.raises(
        UserError, match=f"^{LOG_VARIABLE}: cannot write {tmp_path}/logs/engine.log .No such file.*; name"
    ):
        ask(tmp_path)


def test_a_log_whose_folder_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken, capfd) -> None:
    """A note, and the engine's end is still reported."""
    kept = tmp_path / "logs"
    kept.mkdir()
    broken(f"rm -r {kept}; echo 'ValueError: too small' >&2; exit 7")
    monkeypatch.setenv(LOG_VARIABLE, str(kept / "engine.log"))
    with pytest.raises(UserError, match="could not start .exit code 7.*: ValueError: too small$"):
        ask(tmp_path)
    assert (
        f"note: {LOG_VARIABLE}: the engine's log is not kept, {kept}/engine.log: No such file" in capfd.readouterr().err
    )


def test_death_at_start_shows_the_last_error_lines(tmp_path: Path, broken) -> None:
    broken(
        "echo 'INFO 11-21 05:26:23 [a.py:1] loading' >&2; echo 'ValueError: head size 12 is not supported' >&2; exit 7"
    )
    with pytest.raises(UserError, match="could not start .exit code 7.*: ValueError: head size 12 is not supported$"):
        ask(tmp_path)


def test_a_failing_engine_shows_its_error(tmp_path: Path) -> None:
    """The real worker with an engine that raises: Python's end, which its lifeline would abort, hides nothing."""
    module = tmp_path / "breaks.py"
    module.write_text(
        "PACKAGE = 'json'\n\ndef start(job): return None, {}\n\ndef answers(engine, requests, job):\n"
        "    raise AssertionError('Expected 2D tensors')\n    yield\n"
    )
    engine = replace(ENGINE, module=module)
    with pytest.raises(
        UserError, match=r"vLLM died .exit code 1. with some/model: AssertionError: Expected 2D tensors;"
    ):
        engine.answer("some/model", ASK, media=tmp_path, settings=EngineSettings())


def test_killed_engine_is_reported(tmp_path: Path, broken) -> None:
    broken("""echo '{"event": "ready", "engine": {}}'; kill -9 $$""")
    with pytest.raises(UserError, match="vLLM died .killed by SIGKILL. with some/model; it had been started again"):
        ask(tmp_path)


def test_a_killed_engine_restarts_for_the_remaining_answers(tmp_path: Path, broken) -> None:
    """The second worker gets the request that the first did not answer, and only that."""
    reply = (
        """{"event": "answer", "id": "%s", "text": "hi", "finish": "stop", "prompt_tokens": 3, "output_tokens": 1}"""
    )
    requests_file = tmp_path / "asked"
    broken(
        f"""r=$(dirname $3)/requests.jsonl; cat $r > {requests_file}; echo '{{"event": "ready", "engine": {{"name": "x"}}}}'
        if grep -q one $r; then echo '{reply % "one"}'; kill -9 $$; fi
        echo '{reply % "two"}'; echo '{{"event": "done"}}'"""
    )
    output: list[str] = []
    arrived: list[str] = []
    requests = [Request(name, ASK[0].messages) for name in ("one", "two")]
    run = ENGINE.answer("some/model", requests, media=tmp_path, on_answer=lambda answer: arrived.append(answer.id),
                 progress=lambda text, *_: output.append(text))  # fmt: skip
    assert list(run.answers) == arrived == ["one", "two"]
    assert [json.loads(line)["id"] for line in requests_file.read_text().splitlines()] == ["two"]
    assert run.engine == {"name": "x", "restarts": 1}
    assert [text for text in output if "SIGKILL" in text] == [
        "answering: vLLM died (killed by SIGKILL) with some/model; 1 still to answer"
    ]


def test_an_error_of_the_callers_ends_the_worker(tmp_path: Path, broken) -> None:
    """Such as a full disk under the journal: it is passed on, not taken for a crash, and no process is left."""
    pid = tmp_path / "pid"
    event = '{"event": "answer", "id": "only", "text": "hi", "finish": "stop", "prompt_tokens": 3, "output_tokens": 1}'
    broken(f"""echo $$ > {pid}; echo '{{"event": "ready", "engine": {{}}}}'; echo '{event}'; sleep 600""")

    def full(_: Answer) -> None:
        raise UserError("disk full")

    with pytest.raises(UserError, match="^disk full$"):
        ENGINE.answer("some/model", ASK, media=tmp_path, on_answer=full)
    assert wait_until_gone(int(pid.read_text()))


def test_noise_on_standard_output_is_skipped(tmp_path: Path, broken) -> None:
    event = '{"event": "answer", "id": "only", "text": "hi", "finish": "stop", "prompt_tokens": 3, "output_tokens": 1}'
    broken(f"""echo hello; echo '{{"event": "ready", "engine": {{}}}}'; echo '{event}'; echo '{{"event": "done"}}'""")
    assert ask(tmp_path).answers["only"].text == "hi"


@pytest.mark.parametrize("ready", [False, True])
def test_a_silent_engine_times_out_and_leaves_no_process(tmp_path: Path, broken, ready: bool) -> None:
    pid = tmp_path / "pid"
    first = """echo '{"event": "ready", "engine": {}}'; """ if ready else ""
    broken(f"{first}sleep 600 & echo $! > {pid}; wait")
    with pytest.raises(UserError, match="gave no answer for 2 s" if ready else "had not loaded the model after 4 s"):
        ask(tmp_path, start_timeout=300 if ready else 4, answer_timeout=2)
    assert wait_until_gone(int(pid.read_text()))


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, broken, monkeypatch) -> None:
    monkeypatch.setattr(stop_process, "__defaults__", (0.5,))
    pid = tmp_path / "pid"
    broken(f"trap '' TERM; (trap '' TERM; sleep 600) & echo $! > {pid}; wait; sleep 600")
    with pytest.raises(UserError, match="had not loaded"):
        ask(tmp_path, start_timeout=4)
    assert wait_until_gone(int(pid.read_text()))


def test_a_dead_engine_is_noticed_while_its_child_lives(tmp_path: Path, broken) -> None:
    """As vLLM's workers do when its core has died: the child has the engine's output open and is deaf to SIGTERM."""
    pid = tmp_path / "pid"
    broken(f"""echo '{{"event": "ready", "engine": {{}}}}'; (trap '' TERM; sleep 600) & echo $! > {pid}; kill -9 $$""")
    began = time.monotonic()
    with pytest.raises(UserError, match="vLLM died .killed by SIGKILL."):
        ask(tmp_path, answer_timeout=40)
    assert time.monotonic() - began < 30
    assert wait_until_gone(int(pid.read_text()))


def test_the_last_error_lines_are_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_text(
        "(EngineCore pid=12) ERROR 11-21 05:26:23 [core.py:9] Traceback (most recent call last):\n"
        '(EngineCore pid=12) ERROR 11-21 05:26:23 [core.py:9]   File "a.py", line 3, in f\n'
        "(EngineCore pid=12) ERROR 11-21 05:26:23 [core.py:9]     raise ValueError\n"
        "(EngineCore pid=12) ERROR 11-21 05:26:23 [core.py:9] ValueError: not enough memory\n"
        "RuntimeError: Engine core initialization failed.\nRuntimeError: Engine core initialization failed.\nbye\n"
    )
    assert last_words(log) == ": ValueError: not enough memory | RuntimeError: Engine core initialization failed."
    log.write_text(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, keep must be at most 1 [type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev\n"
    )
    assert last_words(log) == ": Value error, keep must be at most 1"
    log.write_text("one\ntwo\n\n")
    assert last_words(log) == ": one | two"


PARENT = """
import sys
from vlmcompress.engines import Request
from vlmcompress.engines.vllm import ENGINE
ENGINE.answer("some/model", [Request("a", [{"role": "user", "content": "x"}])], media=sys.argv[1])
"""


# What an engine may be busy with. The second keeps Python's lock, so that neither threads nor handlers of signals run.
BUSY = {"asleep": "time.sleep(60)", "in a computation": "ctypes.PyDLL(None).sleep(60)"}


@pytest.mark.parametrize(
    ("sent", "busy"),
    [
        ([signal.SIGINT], "asleep"),
        ([signal.SIGTERM], "in a computation"),
        ([signal.SIGKILL], "in a computation"),
        ([signal.SIGINT] * 2, "asleep"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ([signal.SIGINT], "in a computation"),
                ([signal.SIGTERM], "asleep"),
                ([signal.SIGKILL], "asleep"),
                ([signal.SIGINT] * 2, "in a computation"),
            )
        ),
    ],
)
def test_no_orphan_when_the_parent_dies(tmp_path: Path, broken, sent: list[signal.Signals], busy: str) -> None:
    """Ctrl-C, kill, kill -9 and impatient Ctrl-C of the parent, while the worker's lifeline (its real code) is waiting. A child
    of the worker's is deaf to SIGTERM."""
    pid, up = tmp_path / "pid", tmp_path / "up"
    code = (
        "import ctypes, pathlib, signal, time; from vlmcompress.engines.worker import end_with_parent; "
        f"end_with_parent(); signal.signal(signal.SIGTERM, lambda *_: None); pathlib.Path('{up}').touch(); {BUSY[busy]}"
    )
    broken(f"(trap '' TERM INT; sleep 600) & echo $! > {pid}; {sys.executable} -c \"{code}\"; sleep 600")
    command, env = [sys.executable, "-c", PARENT, str(tmp_path)], {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env)
    while not up.exists():
        assert parent.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    assert parent.poll() is None and alive(int(pid.read_text()))
    for sig in sent:
        parent.send_signal(sig)
        time.sleep(0.5)
    parent.wait(120)
    assert wait_until_gone(int(pid.read_text()))


# ---- the real engine


def image_part(folder: Path, name: str) -> dict:
    return {"type": "image_url", "image_url": {"url": (folder / name).as_uri()}}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.mark.engine
@pytest.mark.slow
def test_the_vllm_engine_runs(qwen: Path, tmp_path: Path, quick_engines) -> None:
    """One run with all kinds of requests. Prompt lengths prove that each image was seen: byte tokens and the image's grid."""
    Image.new("RGB", (56, 84), "red").save(tmp_path / "a.png")  # 4 x 6 patches = 2 x 3 visual tokens, a pair of marks
    Image.new("RGB", (112, 56), "blue").save(tmp_path / "b.png")  # 2 x 4 visual tokens
    a, b = image_part(tmp_path, "a.png"), image_part(tmp_path, "b.png")
    text = {"type": "text", "text": "what"}

    def request(name: str, *parts: dict) -> Request:
        return Request(name, [{"role": "user", "content": list(parts)}])

    requests = [request("text", text), request("a", a, text), request("ab", a, b, text), request("ba", b, a, text)]
    requests += [request("between", a, text, b), Request("plain", [{"role": "user", "content": "what"}])]
    requests += [request(f"again {i}", a, text) for i in range(3)]
    requests += [replace(requests[0], id="short", max_tokens=1)]
    calls: list[tuple] = []
    run = ENGINE.answer(qwen, requests, media=tmp_path, settings=EngineSettings(max_tokens=4, max_num_seqs=2, logprobs=5),
                 label="tiny", progress=lambda *at: calls.append(at))  # fmt: skip
    length = {name: answer.prompt_tokens for name, answer in run.answers.items()}
    assert sorted(run.answers) == sorted(r.id for r in requests)
    assert length["text"] == length["plain"]
    assert (length["a"], length["ab"]) == (length["text"] + 8, length["text"] + 8 + 10)
    assert length["ba"] == length["ab"] == length["between"]
    assert run.answers["again 0"].text == run.answers["again 2"].text
    assert all(0 < answer.output_tokens <= 4 for answer in run.answers.values())
    assert (run.answers["short"].output_tokens, run.answers["short"].finish) == (1, "length")
    for answer in run.answers.values():
        assert answer.first and sum(map(math.exp, answer.first.values())) <= 1.0001
        assert list(answer.first.values()) == sorted(answer.first.values(), reverse=True)
        assert answer.text.startswith(next(iter(answer.first))) or "\ufffd" in answer.text
    assert run.engine["device"] in ("cpu", "cuda") and run.engine["max_model_len"] == 2048
    assert calls[0] == ("tiny: starting vLLM", 0, 10) and calls[-1] == ("tiny", 10, 10)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


@pytest.mark.engine
def test_a_model_that_vllm_cannot_load_is_reported(qwen: Path, tmp_path: Path, quick_engines) -> None:
    """A checkpoint without its weights: the engine's own words, in one line."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in qwen.iterdir():
        if file.suffix != ".safetensors":
            os.link(file, copy / file.name)
    with pytest.raises(UserError, match="vLLM could not load .*weights") as caught:
        ENGINE.answer(copy, ASK, media=tmp_path)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)

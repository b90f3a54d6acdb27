"""The journal: what counts as the same question, and what it survives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.work import little_room
from vlmcompress.engines import Answer, EngineSettings, Request
from vlmcompress.evaluation.accuracy.ask import Identity, answered, identify, key
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.work_folder import open_journal

IDENTITY = Identity("model", "vllm")
ANSWER = Answer("a", " red\n", "stop", 90, 2, {" red": -0.25})


def request(text: str = "what?", image: str = "file:///tmp/x/1234.png", **options) -> Request:
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
    return Request("a", [{"role": "user", "content": content}], **options)


def test_the_key_contains_what_decides_an_answer() -> None:
    base = key(IDENTITY, request(), EngineSettings())
    assert base == key(IDENTITY, replace(request(), id="b"), EngineSettings(max_num_seqs=7, start_timeout=1, seed=3))
    assert base == key(IDENTITY, request(image="file:///elsewhere/1234.png"), EngineSettings())
    assert base == key(IDENTITY, request(max_tokens=32), EngineSettings(max_tokens=5))
    others = [
        key(Identity("other", "vllm"), request(), EngineSettings()),
        key(Identity("model", "hf"), request(), EngineSettings()),
        key(IDENTITY, request("why?"), EngineSettings()),
        key(IDENTITY, request(image="file:///tmp/x/5678.png"), EngineSettings()),
        key(IDENTITY, request(max_tokens=9), EngineSettings()),
        key(IDENTITY, request(), EngineSettings(logprobs=5)),
        key(IDENTITY, request(), EngineSettings(dtype="float32")),
    ]
    assert len({base, *others}) == 8


def test_identity_changes_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    first = identify(tmp_path, "vllm")
    (tmp_path / "results.json").write_text("{}")  # a report in the same folder
    assert first == identify(tmp_path, "vllm") != identify(tmp_path, "hf")
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert identify(tmp_path, "vllm") != first
    assert identify("served-name", "openai:URL") == Identity("served-name", "openai:URL")


def test_answers_come_back(tmp_path: Path) -> None:
    with open_journal(tmp_path / "new" / "journal.jsonl") as journal:
        journal.write("k", asdict(ANSWER))
        journal.write("engine", {"version": 1})
    with open_journal(tmp_path / "new" / "journal.jsonl") as journal:
        assert len(journal) == 2 and journal.read("engine") == {"version": 1} and journal.read("none") is None
        assert answered(journal, {"b": "k", "c": "other"}) == {"b": replace(ANSWER, id="b")}


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.write("first", asdict(ANSWER))
        journal.write("second", asdict(ANSWER))
    path.write_bytes(path.read_bytes()[:-cut])
    with open_journal(path) as journal:
        assert set(answered(journal, {"1": "first", "2": "second"})) == {"1"}
        journal.write("third", asdict(ANSWER))
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["first", "third"]


def test_damage_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"key": "a", "entry": 1}\nnonsense\n')
    with pytest.raises(UserError, match="line 2 is damaged; begin anew with --restart"), open_journal(path):
        pass


SPOILT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda c: st.lists(c, max_size=2) | st.dictionaries(st.text(max_size=4), c, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from([field.name for field in fields(Answer)]), SPOILT, st.booleans(), st.booleans())
def test_an_entry_of_any_kind_is_an_answer_or_refused(tmp_path_factory, name, value, lacks, whole) -> None:
    """A property: one field of another type, or missing, or something else in the place of the entry."""
    entry = {key: item for key, item in asdict(ANSWER).items() if not (lacks and key == name)}
    path = tmp_path_factory.getbasetemp() / "spoilt.jsonl"
    path.write_text(
        json.dumps({"key": "k", "entry": value if whole else entry if lacks else entry | {name: value}}) + "\n"
    )
    with open_journal(path) as journal:
        try:
            answers = answered(journal, {"a": "k"}).values()
        except UserError as error:
            assert "--restart" in str(error)
        else:
            (answer,) = answers or [ANSWER]  # a null is answered again
            assert isinstance(answer.text, str) and answer.prompt_tokens >= 0 and answer.id == "a"
            assert answer.visual_tokens is None or answer.visual_tokens >= 0
            assert all(logarithm <= 1 for logarithm in (answer.first or {}).values())


def test_restart_empties_it(tmp_path: Path) -> None:
    with open_journal(tmp_path / "journal.jsonl") as journal:
        journal.write("k", 1)
    with open_journal(tmp_path / "journal.jsonl", restart=True) as journal:
        assert len(journal) == 0


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path), pytest.raises(UserError, match="another run, process .* is using"), open_journal(path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't open"), open_journal(tmp_path / "file" / "journal.jsonl"):
        pass


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """The file system refuses a write in the middle of a line (here by a limit on the size of files)."""
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.write("first", asdict(ANSWER))
        size = path.stat().st_size
        refused = pytest.raises(UserError, match=r"can't write .*File too large.*the 1 entries written so far are kept")
        with little_room(size + size // 2), refused:
            journal.write("second", asdict(ANSWER))
        assert path.stat().st_size == size
        journal.write("third", asdict(ANSWER))
    with open_journal(path) as journal:
        assert set(answered(journal, {"1": "first", "2": "second", "3": "third"})) == {"1", "3"}


def test_kill_9_loses_nothing_that_was_added(tmp_path: Path) -> None:
    """A process that reports each answer after adding it is killed; all that it reported are there."""
    path = tmp_path / "journal.jsonl"
    code = f"""
from pathlib import Path
from vlmcompress.utils.work_folder import open_journal
with open_journal(Path({str(path)!r})) as journal:
    for n in range(10**9):
        journal.write(str(n), "text")
        print(n, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reported = [int(process.stdout.readline()) for _ in range(25)]
        process.kill()
        reported += [int(line) for line in process.stdout if line.endswith("\n")]
    with open_journal(path) as journal:
        assert all(journal.read(str(n)) == "text" for n in reported)
        assert len(journal) <= len(reported) + 1

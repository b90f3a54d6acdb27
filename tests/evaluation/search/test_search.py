"""`vlmcompress search` on demo-llava with its real images, answered by transformers: killed, continued, confirmed."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.cluster import two_nodes
from tests.kit.command_line import run
from tests.kit.edits import edited, other_weights
from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli
from vlmcompress.evaluation.search.candidate import Candidate, Choice
from vlmcompress.models.data.sources import bundled_data
from vlmcompress.utils import folders, locks

FLAGS = ["--suite", "world", "--engine", "hf", "--optimize", "memory", "--limit", "60", "--max-drop", "0.2"]


def data(split: str) -> str:
    return str(bundled_data(DEMO_LLAVA, split))


def unconfirmed(arguments: list[str]) -> None:
    """Take the flag out that asks for a confirmation."""
    where = arguments.index("--confirm")
    del arguments[where : where + 2]


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    file = tmp_path_factory.mktemp("space") / "space.yaml"
    file.write_text(
        "weights:\n  - {name: w4, scheme: rtn, options: {group_size: 64}}\nimages:\n  - reduce: coverage:0.5\n"
    )
    return file


@pytest.fixture(scope="module")
def call(space, tmp_path_factory, quick_engines):
    """The arguments of a search, confirmed on a part of the test split, and its folder."""
    folder = tmp_path_factory.mktemp("search")
    table = pq.read_table(data("test"))
    pq.write_table(table.slice(0, 90), folder / "other.parquet")
    model, next_to = folder / DEMO_LLAVA.name, folder / "data" / "llava"
    shutil.copytree(DEMO_LLAVA, model)
    shutil.copytree(Path(data("validation")).parent, next_to)
    questions = next_to / "validation.parquet"
    pq.write_table(pq.read_table(questions).slice(0, 150), questions)  # each command below reads them
    arguments = ["search", model, "-o", folder / "finished", "--data", questions, "--space", space, *FLAGS]
    return [*map(str, arguments), "--confirm", str(folder / "other.parquet")], folder / "finished"


@pytest.fixture(scope="module")
def finished(call):
    """The search, killed after its first trial, and run again to its end."""
    arguments, folder = call
    first = subprocess.Popen([sys.executable, "-m", "vlmcompress", *arguments], start_new_session=True)
    journal, end = folder / "search.jsonl", time.monotonic() + 600
    while "trial" not in (journal.read_text() if journal.is_file() else "") and time.monotonic() < end:
        assert first.poll() is None, "ended before its first trial"
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    with locks.held(
        folders.staging_path(folder, "lock"), "waiting", wait=True
    ):  # the program's fork ends a little later
        pass
    done = subprocess.run([sys.executable, "-m", "vlmcompress", *arguments, "--json"], capture_output=True, text=True)
    return done, json.loads(done.stdout), folder


def test_it_ends_with_a_checkpoint_that_was_confirmed(finished):
    done, result, folder = finished
    assert done.returncode == 0, done.stderr
    assert result["confirmed"]["verdict"] == "pass" and result["confirmed"]["questions"] == 90
    winner = next(candidate for candidate in result["candidates"] if candidate["winner"])
    assert winner["name"] == result["winner"]["name"] == "w4 + coverage:0.5", (
        "both changes save memory, and little is lost"
    )
    assert winner["gain"] > max(candidate["gain"] for candidate in result["candidates"] if not candidate["winner"])
    assert cli.main(["doctor", str(folder / "winner"), "--source", str(DEMO_LLAVA)]) == 0
    assert {"report.html", "search.json", "recipe.yaml", "winner", "confirmation"} <= {
        path.name for path in folder.iterdir()
    }
    written = [path for path in (folder / "winner").rglob("*") if path.suffix in (".md", ".sh", ".json", ".yaml")]
    assert not [path.name for path in written if "checkpoint-" in path.read_text()], "it has the name of its folder"
    assert "vllm serve ./winner " in (folder / "winner" / "README.md").read_text()
    assert not (folder / "work").exists() and (folder / "confirmation" / "report.html").is_file()


def test_no_trial_is_done_twice(finished):
    _, result, folder = finished
    keys = [json.loads(line)["key"] for line in (folder / "search.jsonl").read_text().splitlines()]
    trials = Counter(key for key in keys if key.startswith("trial"))
    assert len(trials) == 5 and set(trials.values()) == {1}, "two single changes, then three of 60 questions"
    assert result["questions"] == {"search": 60, "asked": 180, "full_grid": 180}


def test_the_recipe_makes_the_winner(finished, tmp_path, capsys):
    """What the folder's recipe makes has the same weights."""
    _, _, folder = finished
    code, _, err = run(capsys, "quantize", DEMO_LLAVA, "-o", tmp_path / "again", "--recipe", folder / "recipe.yaml")
    assert code == 0, err
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / "winner" / name).read_bytes()


def test_every_loser_has_a_reason(finished):
    _, result, folder = finished
    assert all(bool(candidate["why"]) != candidate["winner"] for candidate in result["candidates"])
    page = (folder / "report.html").read_text()
    assert (
        all(candidate["name"] in page for candidate in result["candidates"])
        and "Confirmed on 90 other questions" in page
    )


@pytest.mark.slow
def test_another_floor_reuses_known_answers(finished, call, capsys):
    """No trial is done anew for a floor that nothing meets, and the nearest is named."""
    _, _, folder = finished
    before = (folder / "search.jsonl").read_text().count('"key": "trial')
    arguments = list(call[0])
    arguments[arguments.index("--max-drop") + 1] = "0.19"
    code, text, err = run(capsys, *arguments)
    assert code == 0 and "Confirmed" in text, err
    assert (folder / "search.jsonl").read_text().count('"key": "trial') == before


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (["--confirm", data("validation")], "confirm on images that the search never sees"),
        (["--max-drop", "0.001"], "cannot be confirmed with less than"),
        (["--max-drop", "1.5"], "is not a share between 0 and 1"),
        (["--optimize", "fastest"], "no such objective"),
        (["--max-time", "soon"], "write a time like 90s, 30m or 1h30m"),
        (["--engine", "openai:http://localhost:1"], "give vllm or hf"),
        (["--limit", "20"], "a search needs at least 30"),
        (["--target", "h1000"], "h1000"),
        (["--images", "eval"], "leave out --data, --suite, --confirm and --calib"),
    ],
)
def test_bad_searches_are_refused(call, tmp_path, capsys, changed, line):
    arguments = list(call[0])
    arguments[arguments.index("-o") + 1] = str(tmp_path / "out")
    flag = changed[0]
    if flag in arguments:
        arguments[arguments.index(flag) + 1] = changed[1]
        changed = changed[2:]
    code, text, err = run(capsys, *arguments, *changed)
    assert code == 2 and line in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "out" / "winner").exists()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("weights: int8\n", "weights should be a list of mappings of recipe keys"),
        ("weights:\n  - {scheme: int8, model: other}\n", "model is the same for all candidates"),
        ("weights:\n  - scheme: int8\nother:\n  - scheme: rtn\n", "both give scheme"),
        ("weights:\n  - scheme: w8a16\n", "nothing is left to search"),
        ("weights:\n  - scheme: int9\n", "nothing is left to search: unknown scheme 'int9'"),
        ("weights:\n  - {name: a, scheme: int8}\n  - {name: a, scheme: awq}\n", "two choices are called 'a'"),
    ],
)
def test_spaces_that_are_refused(call, tmp_path, capsys, content, line):
    (tmp_path / "space.yaml").write_text(content)
    arguments = list(call[0])
    arguments[arguments.index("-o") + 1] = str(tmp_path / "out")
    arguments[arguments.index("--space") + 1] = str(tmp_path / "space.yaml")
    code, _, err = run(capsys, *arguments, "--target", "cpu")
    assert code == 2 and line in err and len(err.strip().splitlines()) == 1, err


def test_a_folder_of_something_else_is_left_alone(call, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    arguments = list(call[0])
    arguments[arguments.index("-o") + 1] = str(tmp_path / "out")
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "has files that do not belong to a search" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_the_log_of_another_search_is_refused(finished, call, capsys):
    arguments = [*call[0], "--seed", "7"]
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "has a search with another seed" in err, err


def another_answer(file: Path) -> bytes:
    """A table's content with all its answers moved by a row."""
    table, sink = pq.read_table(file), io.BytesIO()
    answers = table.column("answer").to_pylist()
    moved = pa.array([*answers[1:], answers[0]], table.schema.field("answer").type)
    pq.write_table(table.set_column(table.schema.get_field_index("answer"), "answer", moved), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    "changed", ["model", *(pytest.param(name, marks=pytest.mark.slow) for name in ("data", "calibration"))]
)
def test_answers_of_edited_files_are_not_reused(finished, call, changed):
    """Under the same path: an edited table of questions or calibration samples, and retrained weights of the same shapes."""
    folder = call[1].parent
    table = folder / "data" / "llava" / f"{'validation' if changed == 'data' else changed}.parquet"
    edit = other_weights(folder / DEMO_LLAVA.name) if changed == "model" else edited(table, another_answer(table))
    with edit:  # in a process of its own, as a user runs it
        done = subprocess.run([sys.executable, "-m", "vlmcompress", *call[0]], capture_output=True, text=True)
    assert done.returncode == 2 and f"has a search with another {changed};" in done.stderr, done.stderr


@pytest.mark.slow
def test_moved_data_are_the_same_data(finished, call, tmp_path, capsys):
    """No trial is done anew for questions that were moved."""
    before = (call[1] / "search.jsonl").read_text().count('"key": "trial')
    moved, arguments = tmp_path / "moved.parquet", list(call[0])
    where = arguments.index("--data") + 1
    shutil.copy(arguments[where], moved)
    arguments[where] = str(moved)
    code, _, err = run(capsys, *arguments)
    assert code == 0, err
    assert (call[1] / "search.jsonl").read_text().count('"key": "trial') == before


@pytest.mark.slow
def test_an_engine_that_dies_costs_one_candidate(call, tmp_path, capsys):
    """transformers cannot load what stands in a candidate's place; that is recorded, and the other one wins."""
    reducer = Candidate((Choice("coverage:0.5", {"reduce": "coverage:0.5"}),))
    broken = tmp_path / "out" / "work" / f"checkpoint-{reducer.folder}"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{}")
    arguments = list(call[0])
    arguments[arguments.index("-o") + 1] = str(tmp_path / "out")
    arguments[arguments.index("--limit") + 1] = "48"
    unconfirmed(arguments)
    code, text, err = run(capsys, *arguments, "--json")
    printed = json.loads(text)
    assert code == 0 and printed["winner"]["name"] == "w4", err
    (lost,) = (candidate for candidate in printed["candidates"] if candidate["name"] == reducer.name)
    assert lost["why"].startswith("failed: ") and lost["questions"] == 0
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_exhausted_budget_ends_the_search(finished, call, capsys):
    code, _, err = run(capsys, *call[0], "--max-time", "1s")
    assert code == 2 and "--max-time is spent: asking the original took" in err, err


@pytest.mark.slow
def test_two_nodes_find_the_same_as_one_process(finished, call, tmp_path, capfd):
    """The same candidates, questions and answers from the workers of two nodes, which share nothing but the model."""
    arguments = list(call[0])
    arguments[arguments.index("-o") + 1] = str(tmp_path / "out")
    unconfirmed(arguments)
    code = cli.main([*arguments, "--ray", two_nodes().address, "--json"])
    here, there = finished[1], json.loads(capfd.readouterr().out)
    assert code == 0 and "confirmed" not in there
    for key in ("winner", "questions", "original"):
        assert there[key] == here[key]
    kept = ("name", "gain", "questions", "difference", "why")
    # without a confirmation to come, a candidate's chance of passing it differs, and nothing else
    assert [[candidate[key] for key in kept] for candidate in there["candidates"]] == [
        [candidate[key] for key in kept] for candidate in here["candidates"]
    ]

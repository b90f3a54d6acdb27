"""Requests divided among workers: no unit is torn, images travel, and two nodes answer as one process does."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import vlmcompress
from tests.kit.cluster import two_nodes
from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli, engines
from vlmcompress.engines import Answer, EngineSettings, Request, data_parallel
from vlmcompress.engines.data_parallel import DataParallel
from vlmcompress.utils import workers
from vlmcompress.utils.errors import UserError


def request(name: str, *images: Path | str) -> Request:
    urls = [image.as_uri() if isinstance(image, Path) else image for image in images]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = {"type": "text", "text": "What color is the shape?"}
    return Request(name, [{"role": "user", "content": [*pictures, text]}], 4)


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=2), max_size=40), st.integers(1, 6))
def test_questions_about_the_same_images_stay_together(pictures: list[list[str]], count: int) -> None:
    requests = [request(str(number), *names) for number, names in enumerate(pictures)]
    parts = data_parallel.divide(requests, 0, count)
    assert sorted(int(question.id) for part in parts for question in part) == list(range(len(requests)))
    assert len(parts) <= count and all(parts)
    homes: dict[tuple[str, ...], set[int]] = {}
    for home, part in enumerate(parts):
        for question in part:
            homes.setdefault(tuple(pictures[int(question.id)]), set()).add(home)
    assert all(len(indices) == 1 for names, indices in homes.items() if names)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 5), st.integers(1, 6))
def test_batches_are_those_of_one_worker(images: list[int], batch: int, count: int) -> None:
    """The batches that the `hf` engine makes, written out: in order, of requests with equally many images."""

    def batches(requests: list[Request]) -> list[list[str]]:
        divided = []
        for number in dict.fromkeys(question.images() for question in requests):
            ids = [question.id for question in requests if question.images() == number]
            divided += [ids[at : at + batch] for at in range(0, len(ids), batch)]
        return divided

    requests = [request(str(number), *"ab"[:many]) for number, many in enumerate(images)]
    parts = data_parallel.divide(requests, batch, count)
    assert len(parts) <= count
    assert sorted(ids for part in parts for ids in batches(part)) == sorted(batches(requests))


def test_parts_are_even() -> None:
    requests = [request(str(number), f"{number}.png") for number in range(100)]
    assert [len(part) for part in data_parallel.divide(requests, 0, 4)] == [25] * 4
    assert [len(part) for part in data_parallel.divide(requests, 8, 4)] == [32, 24, 24, 20]


@pytest.fixture
def media(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    folder.mkdir()
    for number, color in enumerate(("red", "blue", "green")):
        Image.new("RGB", (32, 32), color).save(folder / f"{color} {number}.png")
    return folder


@pytest.mark.slow
def test_one_worker_is_the_engine_itself(media: Path, quick_engines: None) -> None:
    """In two parts, of other lengths and other paths of images."""
    pictures = sorted(media.iterdir())
    requests = [
        *(request(f"one-{number}", pictures[number % 3]) for number in range(4)),
        *(request(f"two-{number}", pictures[number], pictures[2]) for number in range(2)),
    ]
    engine, settings = engines.get_engine("hf"), EngineSettings(max_tokens=4, logprobs=3)
    arrived: list[Answer] = []
    counts: list[tuple[int, int]] = []
    plain = engine.answer(DEMO_LLAVA, requests, media=media, settings=settings)
    run = DataParallel(engine, workers.of(None)).answer(
        DEMO_LLAVA,
        requests,
        media=media,
        settings=settings,
        on_answer=arrived.append,
        progress=lambda _, done, total: counts.append((done, total)),
    )
    assert run.answers == plain.answers == {answer.id: answer for answer in arrived}
    assert run.engine["workers"] == 1 and run.engine["restarts"] == 0
    assert {name: run.engine[name] for name in ("name", "version", "dtype")} == {
        name: plain.engine[name] for name in ("name", "version", "dtype")
    }
    assert counts == [(0, 6), (4, 6), (6, 6)] and run.seconds > 0


def test_images_that_other_nodes_lack_are_refused(media: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    shutil.copy(next(media.iterdir()), outside)
    engine = DataParallel(engines.get_engine("hf"), workers.of(None))
    for image, reason in ((outside, "is not a file in"), (media / "none.png", "can't be read (No such file")):
        with pytest.raises(UserError, match=r"^sample 'one': ") as caught:
            engine.answer(DEMO_LLAVA, [request("one", image)], media=media)
        assert reason in str(caught.value)


def test_another_model_on_a_node_is_refused(tmp_path: Path) -> None:
    """On one machine: what a worker finds differs from what the run was started with."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_LLAVA, model)
    part = data_parallel.Part(
        engines.get_engine("hf"), str(model), None, data_parallel.model_hash(model), EngineSettings()
    )
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match="differs from the one where the run was started; copy it there again$"):
        data_parallel.answer_part(part)
    with pytest.raises(UserError, match="does not exist on node .*; put the model at the same path on every node$"):
        data_parallel.answer_part(dataclasses.replace(part, model=str(tmp_path / "none")))


@pytest.mark.slow
def test_a_failing_part_is_reported(media: Path, tmp_path: Path, quick_engines: None) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="^transformers could not load "):
        DataParallel(engines.get_engine("hf"), workers.of(None)).answer(tmp_path, [request("one")], media=media)


def test_a_server_is_not_spread(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["eval", "NAME", "--baseline", "NAME2", "--engine", "openai:http://localhost:9", "--ray", "auto"]
    assert cli.main(call) == 2
    error = capsys.readouterr().err
    assert "--ray starts engines on the nodes of a cluster, and openai:http://localhost:9/v1 runs already" in error


@pytest.mark.slow
def test_two_nodes_answer_as_one_process_does(
    tmp_path: Path, quick_engines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 questions are two batches, so each node has one. A journal spares asking the same model twice."""
    monkeypatch.setenv("RAY_ADDRESS", two_nodes().address)  # what `auto` looks at first
    runs = {
        where: vlmcompress.evaluate(
            DEMO_LLAVA, DEMO_LLAVA, engine="hf", limit=12, ray=where, journal=tmp_path / str(where)
        )
        for where in (None, "auto")
    }
    plain, two = runs[None], runs["auto"]
    assert two.samples == plain.samples and len(two.samples) == 12
    assert two.suites == plain.suites and two.pictures == plain.pictures
    assert two.candidate.engine["workers"] == 2 and "workers" not in plain.candidate.engine
    journals = [(tmp_path / str(where)).read_text().splitlines() for where in runs]
    answers = [sorted(line for line in lines if '"text"' in line) for lines in journals]
    assert answers[0] == answers[1], "keys and probabilities"

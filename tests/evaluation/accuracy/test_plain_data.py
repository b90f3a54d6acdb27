"""Rows of one's own as a suite: columns, bad rows and images, and what is chosen in their places."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.echo import checkpoint, picture, write_rows
from tests.kit.pictures import file_of, refused
from tests.kit.pictures import picture as noise
from vlmcompress.evaluation.accuracy import local_data
from vlmcompress.evaluation.accuracy.tasks import LoadedSuite, load_suite
from vlmcompress.models.data.sources import Reading
from vlmcompress.utils.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model")
    picture(tmp_path, "a.png")
    (tmp_path / "cut.png").write_bytes(file_of(noise())[:200])
    return tmp_path


def load(folder: Path, name: str = "d.jsonl", **options) -> LoadedSuite:
    model = folder / "model"
    return load_suite(folder / name, candidate=model, baseline=model, **options)


def row(name: str, image: str = "a.png", **others: object) -> dict:
    return {"id": name, "image": image, "question": "q", "answer": "a"} | others


def test_bad_rows_and_images_are_named_together(folder: Path) -> None:
    rows = [row("a"), row("b", "cut.png"), row("c"), row("d", "cut.png")]
    write_rows(folder / "d.jsonl", *rows)
    refused(lambda: load(folder), "d.jsonl: 2 of 4 samples cannot be used: line 2, line 4: image '", "--skip-bad 2")
    assert [place.id for place in load(folder, reading=Reading(skip_bad=2)).places] == ["a", "c"]
    write_rows(folder / "d.jsonl", *rows, row("e", answer=" "), row("f", "gone.png"))
    refused(
        lambda: load(folder), "4 of 6 samples cannot be used: line 2, line 4: ", "; line 5: has no answer", "; line 6: "
    )
    refused(
        lambda: load(folder, reading=Reading(skip_bad=2)), "4 of 6 samples cannot be used, more than skip_bad 2 allows"
    )
    assert len(load(folder, reading=Reading(skip_bad=0.7))) == 2


def test_bad_images_are_replaced_by_other_samples(folder: Path) -> None:
    """As if the bad ones were not there; only what is chosen is decoded."""
    write_rows(folder / "d.jsonl", *(row(f"r{number}", "cut.png" if number % 2 else "a.png") for number in range(40)))
    chosen = load(folder, limit=12, reading=Reading(skip_bad=0.5))
    write_rows(folder / "e.jsonl", *(row(f"r{number}") for number in range(0, 40, 2)))
    assert {place.id for place in chosen.places} <= {f"r{number}" for number in range(0, 40, 2)} and len(chosen) == 12
    assert {place.id for place in chosen.places} == {place.id for place in load(folder, "e.jsonl", limit=12).places}
    write_rows(folder / "d.jsonl", *(row(f"r{number}") for number in range(40)), row("bad", "cut.png"))
    assert "bad" not in {place.id for place in load(folder, limit=4).places}


def test_columns_and_lists_of_answers(folder: Path) -> None:
    write_rows(folder / "d.jsonl", {"img": "a.png", "ask": "How many?", "label": ["14"]})
    (place,) = load(folder, reading=Reading({"question": "ask"})).places
    refused(lambda: load(folder), "d.jsonl needs columns question and answer; found: ask, img, label", "=A,answer=B")
    write_rows(folder / "d.jsonl", {"image": "a.png", "question": "How many?", "answers": ["2", "two", "2"]})
    suite = load(folder)
    assert suite.tasks["custom"].eval_docs[0]["answer"] == "2"


LEAF = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["a.png", "\ud800", "http://x"])
)
VALUE = st.recursive(
    LEAF,
    lambda c: st.lists(c, max_size=2) | st.dictionaries(st.sampled_from(["bytes", "path", "url"]), c, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(["image", "images", "decoded_image", "image_1", "question", "answer", "id"])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.dictionaries(NAMES, VALUE, max_size=4) | VALUE, min_size=1, max_size=2))
def test_any_row_of_a_suites_data_is_read_or_refused(tmp_path_factory, rows) -> None:
    """A property of the reader of suites' data: whatever stands in a field, there are documents, or a `UserError`."""
    datasets.disable_progress_bars()
    file = tmp_path_factory.mktemp("rows") / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with contextlib.suppress(UserError):
        for document in local_data.load("any", data=str(file))["test"]:
            list(local_data.images(document))


def test_scores_that_data_do_not_allow_are_not_offered(folder: Path) -> None:
    refused(
        lambda: load(folder, "nope.jsonl"), "nope.jsonl does not exist; give a .jsonl or .parquet file with answers"
    )
    (folder / "images").mkdir()
    picture(folder / "images", "a.png")
    refused(lambda: load(folder, "images"), "is a folder of images, without answers to score")
    model = folder / "model"
    options = {"candidate": model, "baseline": model, "reading": Reading({"image": "x"})}
    refused(lambda: load_suite("chartqa", folder, **options), "suite chartqa defines how its data are read")

"""Folders, JSON lines, parquet, saved data sets: the same rows must give the same samples from each."""

from __future__ import annotations

import base64
import csv
import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.kit.pictures import file_of, picture, refused
from vlmcompress.models.data.layouts import LETTER
from vlmcompress.models.data.provenance import data_hash, data_notes, provenance
from vlmcompress.models.data.sources import PROMPTS, bundled_data, load_samples
from vlmcompress.utils.errors import UserError


def rows(count: int) -> list[dict]:
    return [
        {
            "id": f"r{i}",
            "image": [file_of(picture(8, 6, i))],
            "question": f"q{i}",
            "answer": f"a{i}",
            "family": "f",
            "keep": i / 8,
        }
        for i in range(count)
    ]


def json_lines(path: Path, table: list[dict]) -> Path:
    """The rows with their images in files next to the JSON."""
    lines = []
    for index, row in enumerate(table):
        (path.parent / f"{path.stem}-{index}.png").write_bytes(row["image"][0])
        lines.append(json.dumps({**row, "image": f"{path.stem}-{index}.png"}))
    path.write_text("\n".join(lines) + "\n\n")
    return path


def parquet(path: Path, table: list[dict], group: int = 3) -> Path:
    pq.write_table(pa.Table.from_pylist(table), path, row_group_size=group)
    return path


def ids(samples) -> list[str]:
    return [sample.id for sample in samples]


def test_all_sources_agree(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = rows(7)
    saved = tmp_path / "saved"
    features = datasets.Features(
        {**{k: datasets.Value("string") for k in ("id", "question", "answer", "family")}, "image": datasets.Image()}
        | {"keep": datasets.Value("float64")}
    )
    flat = [{**row, "image": {"bytes": row["image"][0], "path": None}} for row in table]
    datasets.Dataset.from_list(flat, features=features).save_to_disk(saved)
    listed = tmp_path / "rows.json"
    json_lines(tmp_path / "list.jsonl", table)
    lines = (tmp_path / "list.jsonl").read_text().splitlines()
    listed.write_text(f"[{','.join(filter(None, lines))}]")
    read = [json.loads(line) for line in filter(None, lines)]
    with (tmp_path / "rows.csv").open("w") as file:
        writer = csv.DictWriter(file, read[0])
        writer.writeheader()
        writer.writerows(read)
    sources = [json_lines(tmp_path / "rows.jsonl", table), parquet(tmp_path / "rows.parquet", table), saved, listed]
    sources.append(tmp_path / "rows.csv")
    loaded = [load_samples(source, samples=4, seed=1) for source in sources]
    for samples in loaded:
        assert ids(samples) == ids(loaded[0]) and len(samples) == 4
        assert data_hash(samples) == data_hash(loaded[0])
        for sample in samples:
            number = int(sample.id[1:])
            assert (sample.question, sample.answer, sample.family) == (f"q{number}", f"a{number}", "f")
            assert sample.keep == number / 8
            assert (np.asarray(sample.images[0]) == np.asarray(picture(8, 6, number))).all()


def test_choice_depends_on_ids_and_seed_only(tmp_path):
    table = rows(20)
    whole = load_samples(parquet(tmp_path / "a.parquet", table), samples=8, seed=0)
    turned = load_samples(parquet(tmp_path / "b.parquet", table[::-1], group=7), samples=8, seed=0)
    fewer = load_samples(parquet(tmp_path / "c.parquet", table[:18]), samples=8, seed=0)
    other = load_samples(tmp_path / "a.parquet", samples=8, seed=1)
    assert ids(whole) == ids(turned) and len(set(ids(whole))) == 8
    assert len(set(ids(whole)) - set(ids(fewer))) <= 2
    assert set(ids(whole)) != set(ids(other))
    assert ids(load_samples(tmp_path / "a.parquet", samples=3, seed=0)) == ids(whole)[:3]
    assert ids(load_samples(tmp_path / "a.parquet", samples=None, seed=0)) == [f"r{i}" for i in range(20)]


def test_fewer_samples_than_requested_are_all_used_and_reported(tmp_path):
    path = parquet(tmp_path / "a.parquet", rows(3))
    loaded = load_samples(path, samples=5, seed=0)
    assert sorted(ids(loaded)) == ["r0", "r1", "r2"]
    facts = provenance(loaded, [{"modality": torch.ones(1, 2)}] * 3, path, requested=5)
    assert (facts["samples"], facts["asked"]) == (3, 5)
    assert data_notes(facts) == ["a.parquet has 3 samples, 5 were asked for; all are used"]
    enough = provenance(loaded, [{"modality": torch.ones(1, 2)}] * 3, path, requested=3)
    assert "asked" not in enough and "prompts" not in enough and data_notes(enough) == []


def test_default_prompts_are_reported(tmp_path):
    for name in "abcde":
        (tmp_path / f"{name}.png").write_bytes(file_of(picture(8, 6)))
    loaded = load_samples(tmp_path, samples=5, seed=0)
    facts = provenance(loaded, [{"modality": torch.ones(1, 2)}] * 5, tmp_path)
    prompts = facts["prompts"]
    assert sum(prompts.values()) == 5 and set(prompts) == {sample.question for sample in loaded} <= set(PROMPTS)
    (line,) = data_notes(facts)
    assert line.startswith(
        f"{tmp_path.name} has images without questions; each gets one of {len(prompts)} prompts, like '"
    )


def test_conversations_in_every_kind_of_file(tmp_path):
    (tmp_path / "a.png").write_bytes(file_of(picture(8, 6)))
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "cat"}]
    table = [{"id": "1", "image": "a.png", "conversations": turns}]
    (tmp_path / "a.jsonl").write_text(json.dumps(table[0]) + "\n")
    (tmp_path / "a.json").write_text(json.dumps(table))
    for path in (tmp_path / "a.jsonl", tmp_path / "a.json", parquet(tmp_path / "a.parquet", table)):
        (sample,) = load_samples(path, samples=1, seed=0)
        assert (sample.id, sample.question, sample.answer, len(sample.images)) == ("1", "what?", "cat", 1)
    text = [{"conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "cat"}]}]
    (tmp_path / "t.json").write_text(json.dumps(text))
    assert load_samples(tmp_path / "t.json", samples=1, seed=0, text=True)[0].answer == "cat"


def test_rows_without_an_image_are_used_and_reported(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "2+2?", "answer": "4", "topic": "sums"}')
    (sample,) = loaded = load_samples(path, samples=2, seed=0)
    assert (sample.question, sample.answer, len(sample.images)) == ("2+2?", "4", 0)
    assert any(
        "shows an image" in line for line in data_notes(provenance(loaded, [{"modality": torch.ones(1, 2)}], path))
    )


def test_missing_and_repeated_ids(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"image": [], "question": "x", "id": i}) for i in (None, "x", "x", 7)))
    assert ids(load_samples(path, samples=None, seed=0)) == ["1", "x#2", "x#3", "7"]


def test_ids_of_other_types_are_refused(tmp_path):
    """One text of a megabyte, stored once for all rows, would be 50 GB of ids."""
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 50_000, pa.int32()), pa.array(["x" * 10**6]))
    pq.write_table(pa.table({"id": rows, "question": ["q"] * 50_000}), tmp_path / "a.parquet")
    refused(
        lambda: load_samples(tmp_path / "a.parquet", samples=2, seed=0), "an id of 1,000,000 bytes", "--columns id=A"
    )


def test_folder(tmp_path, caplog):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.png", "sub/a.PNG", ".hidden/c.png", "._b.png"):
        (tmp_path / name).write_bytes(file_of(picture(8, 6)))
    (tmp_path / "link.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with caplog.at_level(logging.WARNING):
        loaded = load_samples(tmp_path, samples=None, seed=0)
    assert ids(loaded) == ["b.png", "link.png", "sub/a.PNG"]
    assert "1 files that are not images are ignored (.txt)" in caplog.text
    assert all(sample.answer is None and sample.question in PROMPTS for sample in loaded)
    (tmp_path / "sub" / "broken.jpg").write_bytes(b"\xff\xd8junk")
    refused(lambda: load_samples(tmp_path, samples=None, seed=0), "sub/broken.jpg", "not an image")


def test_folders_without_images(tmp_path):
    refused(lambda: load_samples(tmp_path, samples=1, seed=0), "has no images", "give a folder")
    (tmp_path / "rows.parquet").touch()
    refused(lambda: load_samples(tmp_path, samples=1, seed=0), "only .parquet", "name its .parquet file")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    refused(lambda: load_samples(tmp_path, samples=1, seed=0), "gone.png", "not found")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "\n\n", "no samples"),
        ("a.jsonl", '{"image": [], "question": "x"}\n{"image": \n', "line 2 is not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1 is a list"),
        (
            "a.jsonl",
            '{"pixels": 1, "q": 2}\n',
            "needs a column question (next to image, if there are images), or messages, or conversations; found: pixels, q",
        ),
        ("a.jsonl", '{"Image_a": "a", "question": "x"}', "no column image, and 'Image_a' is not read; rename it"),
        ("a.jsonl", '{"image": [], "question": "x"}\n{"image": []}\n', "a.jsonl line 2: question is missing"),
        ("a.json", "{}", "not a list of rows"),
        ("a.json", "[", "not valid JSON"),
        ("a.xls", "image,question", "is not .jsonl, .ndjson, .json, .parquet, .csv, .tsv; give one"),
        ("a.parquet", "", "is empty"),
        ("a.parquet", "PAR1 junk", "not readable parquet"),
    ],
)
def test_broken_files_are_refused(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    refused(lambda: load_samples(tmp_path / name, samples=None, seed=0), name, expected)


def test_tables_of_vlmevalkit(tmp_path):
    """Images in base64, the index of another row's image, or several; options after the question, the category as family."""
    encoded = base64.b64encode(file_of(picture(8, 6, 1))).decode()
    head = "index\timage\tquestion\thint\tA\tB\tC\tanswer\tcategory"
    rows = [
        f'0\t{encoded}\t"Which\none?"\tLook\tred\tblue\t\tB\tcolour',
        "1\t0\tHow many?\t\t1\t2\t3\tA\tcount",
        f"2\t['{encoded}', '{encoded}']\tSame?\t\tyes\tno\t\tA\tcount",
    ]
    (tmp_path / "mm.tsv").write_text("\n".join([head, *rows]) + "\n")
    first, second, third = load_samples(tmp_path / "mm.tsv", samples=None, seed=0, answered=True)
    assert first.question == f"Look\nWhich\none?\nA. red\nB. blue\n{LETTER}"
    assert (first.id, first.row_id, first.answer, first.family) == ("0", "0", "B", "colour")
    assert second.question == f"How many?\nA. 1\nB. 2\nC. 3\n{LETTER}" and second.images[0].size == (8, 6)
    assert len(third.images) == 2


def test_comma_separated_values(tmp_path):
    (tmp_path / "a.png").write_bytes(file_of(picture(8, 6, 1)))
    file = tmp_path / "d.csv"
    file.write_text(
        '\ufeffimage_path,question,answer\r\na.png,"How many, and where?",-5\r\na.png,q,\r\n', encoding="utf-8"
    )
    first, second = load_samples(file, samples=None, seed=0)
    assert (first.question, first.answer, second.answer) == ("How many, and where?", "-5", None)
    refused(lambda: load_samples(file, samples=None, seed=0, answered=True), "d.csv line 3 has no answer")
    for content, message in (
        ("image_path,question\na.png,How many, and where?\n", "line 2 has more cells than the first line (2)"),
        ("image_path,question\na.png\n", "line 2 has fewer cells than the first line (2)"),
        ("question,question\na,b\n", "has two columns 'question'"),
        ('image_path,question\na.png,"q', "is no row (unexpected end of data)"),
        ("image_path,question\n", "has no samples"),
    ):
        file.write_text(content)
        refused(lambda: load_samples(file, samples=None, seed=0), "d.csv", message)


def test_nan_is_a_missing_value(tmp_path):
    """pandas writes it for an empty cell; it is no text, whose answer would be 'nan'."""
    (tmp_path / "d.jsonl").write_text('{"question": "q", "answer": NaN}\n{"question": "q", "answer": "nan"}\n')
    pq.write_table(pa.table({"question": ["q", "r"], "answer": [float("nan"), 2.5]}), tmp_path / "d.parquet")
    for name, place, other in (("d.jsonl", "line 1", "nan"), ("d.parquet", "row 1", "2.5")):
        with pytest.raises(UserError, match=f"{name} {place} has no answer"):
            load_samples(tmp_path / name, samples=None, seed=0, answered=True)
        assert [sample.answer for sample in load_samples(tmp_path / name, samples=None, seed=0)] == [None, other]


def test_more_broken_files(tmp_path):
    refused(lambda: load_samples(tmp_path / "gone.jsonl", samples=1, seed=0), "does not exist")
    (tmp_path / "latin.jsonl").write_bytes('{"question": "größe"}'.encode("latin-1"))
    refused(lambda: load_samples(tmp_path / "latin.jsonl", samples=1, seed=0), "not UTF-8")
    path = parquet(tmp_path / "a.parquet", rows(4))
    refused(lambda: load_samples(path, samples=0, seed=0), "samples is 0")
    data = path.read_bytes()
    path.write_bytes(data[:-40])
    refused(lambda: load_samples(path, samples=1, seed=0), "not readable parquet")
    path.write_bytes(data[:10] + bytes(200) + data[210:])
    refused(lambda: load_samples(path, samples=None, seed=0), "a.parquet")
    pq.write_table(pa.table({"id": pa.array([], pa.string()), "image": [], "question": []}), path)
    refused(lambda: load_samples(path, samples=None, seed=0), "no samples")
    pq.write_table(pa.table({"url": ["x"]}), path)
    refused(lambda: load_samples(path, samples=None, seed=0), "found: url")


def test_broken_image_of_a_chosen_row(tmp_path):
    table = rows(3)
    table[1]["image"] = [table[1]["image"][0][:60]]
    path = parquet(tmp_path / "a.parquet", table)
    refused(lambda: load_samples(path, samples=None, seed=0), "a.parquet row 2", "cannot be decoded")
    assert len(load_samples(path, samples=None, seed=0, decode_images=False)) == 3


def test_saved_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"question": "x", "image": None}])
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "splits")
    refused(lambda: load_samples(tmp_path / "splits", samples=1, seed=0), "splits train", "name one")
    assert len(load_samples(tmp_path / "splits" / "train", samples=None, seed=0)) == 1
    many = datasets.Features({"question": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    row = {"question": "x", "images": [{"bytes": file_of(picture(8, 6, i)), "path": None} for i in range(2)]}
    datasets.Dataset.from_list([row], features=many).save_to_disk(tmp_path / "many")
    assert len(load_samples(tmp_path / "many", samples=None, seed=0)[0].images) == 2
    (tmp_path / "many" / "state.json").write_text("{")
    refused(lambda: load_samples(tmp_path / "many", samples=None, seed=0), "not a readable saved data set")


def test_bundled(tmp_path):
    (tmp_path / "demo-qwen").mkdir()
    assert bundled_data(tmp_path / "demo-qwen", "test") is None
    (tmp_path / "data" / "qwen").mkdir(parents=True)
    (tmp_path / "data" / "qwen" / "test.parquet").touch()
    assert bundled_data(tmp_path / "demo-qwen", "test") == (tmp_path / "data" / "qwen" / "test.parquet").resolve()
    assert bundled_data(tmp_path / "qwen", "test") is None

"""Rows as public data sets have them, rows that cannot be used, rows of any content. Oracle: what a reader would be shown."""

from __future__ import annotations

import base64
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.kit.pictures import contents, file_of, picture, refused
from vlmcompress.models.data import layouts, sources
from vlmcompress.models.data.samples import Sample, open_image
from vlmcompress.models.data.sources import PROMPTS, Reading, load_samples, preview
from vlmcompress.utils.errors import UserError

FILES = {width: file_of(picture(width, 4)) for width in (5, 6, 7)}  # images that tell themselves apart by their width
STORED = {width: {"bytes": data, "path": None} for width, data in FILES.items()}


def read(folder: Path, *rows: dict, **options) -> list[Sample]:
    """The samples of a parquet file with these rows."""
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "set.parquet")
    return load_samples(folder / "set.parquet", samples=None, seed=0, **options)


PEOPLE = ["two", "2", "2", "three"]
LAYOUTS: dict[str, tuple[dict, list]] = {
    "flickr30k": (
        {"image": STORED[5], "caption": ["A cat.", "Cat!"], "sentids": ["0"], "filename": "1.jpg"},
        [("user", 5, layouts.CAPTIONED), ("assistant", "A cat.")],
    ),
    "ChartQA": (
        {"image": STORED[5], "query": "How many?", "label": ["14"], "human_or_machine": 0},
        [("user", 5, "How many?"), ("assistant", "14")],
    ),
    "MMMU": (
        {
            "id": "a_1",
            "question": "Is <image 2> left of <image 1>?",
            "options": "['yes', 'as in <image 1>']",
            "answer": "B",
            "image_1": STORED[5],
            "image_2": STORED[6],
            "image_3": None,
        },
        [("user", "Is ", 6, " left of ", 5, "?\n\n(A) yes\n(B) as in ", "image 1"), ("assistant", "B")],
    ),
    "numbers without marks": (
        {"question": "Which?", "image_2": STORED[6], "image_1": STORED[5]},
        [("user", 5, 6, "Which?")],
    ),
    "the_cauldron": (
        {
            "images": [STORED[5]],
            "texts": [
                {"user": "What?", "assistant": "A cat.", "source": "x"},
                {"user": "Where?", "assistant": "Here."},
            ],
        },
        [("user", 5, "What?"), ("assistant", "A cat."), ("user", "Where?"), ("assistant", "Here.")],
    ),
    "TRL, texts": ({"prompt": "2+2?", "completion": "4"}, [("user", "2+2?"), ("assistant", "4")]),
    "TRL, turns": (
        {
            "images": [STORED[5]],
            "prompt": [{"role": "user", "content": "<image>What?"}],
            "completion": [{"role": "assistant", "content": "A cat."}],
        },
        [("user", 5, "What?"), ("assistant", "A cat.")],
    ),
    "TRL, preferences": (
        {"prompt": [{"role": "user", "content": "2+2?"}], "chosen": "4", "rejected": "5"},
        [("user", "2+2?"), ("assistant", "4")],
    ),
    "TextVQA, DocVQA": (
        {"image": STORED[5], "question": "How many?", "answers": PEOPLE},
        [("user", 5, "How many?"), ("assistant", "2")],
    ),
    "VQAv2": (
        {"image": STORED[5], "question": "How many?", "answers": [{"answer": name, "answer_id": 1} for name in PEOPLE]},
        [("user", 5, "How many?"), ("assistant", "2")],
    ),
    "SQuAD": (
        {"question": "Who?", "answers": {"text": ["Ann", "Ann B."], "answer_start": [3, 3]}},
        [("user", "Who?"), ("assistant", "Ann")],
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        [("user", "Add.\n2 and 2"), ("assistant", "4")],
    ),
    "MathVista": (
        {"decoded_image": STORED[5], "image": "images/1.jpg", "question": "How many?", "answer": "2"},
        [("user", 5, "How many?"), ("assistant", "2")],
    ),
    "a class and a prompt that are not meant": (
        {"question": "How many?", "label": 3, "prompt": "Think."},
        [("user", "How many?")],
    ),
    "capitals": (
        {"Image": STORED[5], "Question": "How many?", "Answer": 2},
        [("user", 5, "How many?"), ("assistant", "2")],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_public_sets(name, tmp_path):
    row, expected = LAYOUTS[name]
    (sample,) = read(tmp_path, row)
    assert contents(sample) == expected
    assert sample.prompted == (name == "flickr30k")


def test_answers_of_several_people_are_kept(tmp_path):
    (sample,) = read(tmp_path, {"question": "How many?", "answers": PEOPLE})
    assert sample.references == ("two", "2", "three") and sample.answer == "2"
    refused(lambda: read(tmp_path, {"question": "x", "answer": [1.5]}), "row 1: answer is a list; give one text")


def test_images_alone_get_prompts_as_in_a_folder(tmp_path):
    samples = read(tmp_path, *({"image": STORED[5], "label": number, "id": f"r{number}"} for number in range(12)))
    questions = {sample.question for sample in samples}
    assert questions <= set(PROMPTS) and len(questions) > 2 and all(sample.prompted for sample in samples)
    assert all(sample.answer is None for sample in samples)
    (tmp_path / "a.png").write_bytes(FILES[5])
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a cat"}\n')
    (sample,) = load_samples(tmp_path / "metadata.jsonl", samples=1, seed=0)
    assert contents(sample) == [("user", 5, layouts.CAPTIONED), ("assistant", "a cat")]


def test_columns_with_names_of_their_own(tmp_path):
    row = {
        "key": "k7",
        "shot": STORED[6],
        "image": STORED[5],
        "q": "What?",
        "question": "no",
        "said": "A cat.",
        "kind": "x",
    }
    columns = {"id": "key", "image": "shot", "question": "q", "answer": "said", "family": "kind"}
    (sample,) = read(tmp_path, row, reading=Reading(columns))
    assert contents(sample) == [("user", 6, "What?"), ("assistant", "A cat.")]
    assert (sample.id, sample.row_id, sample.family) == ("k7", "k7", "x")
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A cat."}]
    (sample,) = read(
        tmp_path, {"talk": turns, "shot": STORED[6]}, reading=Reading({"messages": "talk", "image": "shot"})
    )
    assert contents(sample) == [("user", 6, "What?"), ("assistant", "A cat.")]
    refused(
        lambda: read(tmp_path, row, reading=Reading({"answer": "sad"})),
        "set.parquet has no column 'sad', which columns names for answer; did you mean 'said'?",
    )
    refused(lambda: read(tmp_path, row, reading=Reading({"picture": "shot"})), "'picture', which is no field")
    refused(lambda: read(tmp_path, {"q": "What?"}), "found: q; name them by columns (--columns image=A,question=B)")


def lines(folder: Path, *rows: dict | str) -> Path:
    """A JSON lines file with these rows, or texts in their places."""
    (folder / "a.png").write_bytes(FILES[5])
    (folder / "cut.png").write_bytes(FILES[5][:60])
    file = folder / "data.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


GOOD = {"image": "a.png", "question": "What?", "answer": "cat"}
BAD = ('{"image": ', GOOD | {"image": "gone.png"}, GOOD | {"question": " "}, GOOD | {"image": "cut.png"})


def spoilt(folder: Path, good: int = 36) -> Path:
    """Rows of which the lines 10, 20, 30 and 40 are bad."""
    rows: list[dict | str] = [GOOD | {"id": f"r{number}"} for number in range(good)]
    for number, bad in enumerate(BAD):
        rows.insert(9 + 10 * number, bad)
    return lines(folder, *rows)


def test_all_bad_rows_are_named_at_once_in_the_order_of_the_file(tmp_path):
    with pytest.raises(UserError) as caught:
        load_samples(spoilt(tmp_path), samples=None, seed=0)
    message = str(caught.value)
    assert message.startswith("data.jsonl: 4 of 40 samples cannot be used: line 10: ")
    assert message.endswith("; mend or drop them, or skip them with --skip-bad 4")
    places = [
        message.index(text) for text in ("not valid JSON", "20: image 'gone.png'", "30: question is", "40: image '")
    ]
    assert places == sorted(places)
    alike = lines(tmp_path, GOOD, *[GOOD | {"answer": [3]}] * 2)
    refused(
        lambda: load_samples(alike, samples=3, seed=0),
        "2 of 3 samples cannot be used: line 2, line 3: answer is a list;",
    )
    refused(
        lambda: load_samples(lines(tmp_path, GOOD, BAD[2]), samples=9, seed=0), "data.jsonl line 2: question is missing"
    )


@pytest.mark.parametrize("skip", [4, 0.1])
def test_bad_rows_are_replaced_by_others(tmp_path, skip, capsys):
    file = spoilt(tmp_path)
    samples = load_samples(file, samples=30, seed=0, reading=Reading(skip_bad=skip))
    assert len(samples) == 30 and "data.jsonl line 10" in samples.skipped
    assert capsys.readouterr().err.count("note: skipped: data.jsonl line ") == len(samples.skipped)
    order = [
        sample.id
        for sample in load_samples(lines(tmp_path, *[GOOD | {"id": f"r{n}"} for n in range(36)]), samples=36, seed=0)
    ]
    assert [sample.id for sample in samples] == [name for name in order if name in {s.id for s in samples}]
    whole = load_samples(spoilt(tmp_path), samples=None, seed=0, reading=Reading(skip_bad=skip))
    assert len(whole) == 36 and list(whole.skipped) == [f"data.jsonl line {number}" for number in (10, 20, 30, 40)]
    less = Reading(skip_bad=3 if skip == 4 else 0.09)
    refused(lambda: load_samples(file, samples=None, seed=0, reading=less), "more than skip_bad", "4 of 40 samples")


def test_a_preview_opens_images_and_counts_them(tmp_path, monkeypatch):
    file = lines(tmp_path, *[GOOD] * 3, {"question": "2+2?"})
    look = preview(file, samples=9, seed=0)
    assert look and (look.count, look.decoded, look.text) == (4, 3, "all rows and images were read")
    refused(lambda: preview(lines(tmp_path, GOOD, BAD[3]), samples=9, seed=0), "data.jsonl line 2", "cannot be decoded")
    monkeypatch.setattr(sources, "DECODED", 1)
    look = preview(lines(tmp_path, *[GOOD] * 3), samples=9, seed=0)
    assert look and look.text == "all rows and the images of 1 were read"
    (tmp_path / "text.png").write_text("no image")
    refused(
        lambda: preview(lines(tmp_path, GOOD, GOOD | {"image": "text.png"}), samples=9, seed=0),
        "line 2",
        "not an image",
    )


def test_images_in_base64(tmp_path):
    plain = base64.b64encode(file_of(picture(120, 90))).decode()
    assert len(plain) > 5000, "no path can be so long"
    (sample,) = load_samples(lines(tmp_path, GOOD | {"image": plain}), samples=1, seed=0)
    assert sample.images[0].size == (120, 90)
    refused(
        lambda: load_samples(lines(tmp_path, GOOD | {"image": "A" * 9000}), samples=1, seed=0),
        "data.jsonl line 1: image 'AAAA",
    )


def test_texts_and_names_that_are_no_unicode(tmp_path):
    half = '{"question": "\\ud800?", "answer": "x"}'
    refused(lambda: load_samples(lines(tmp_path, half), samples=1, seed=0), "line 1", "half of a surrogate pair")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "gr\udcfcn.png").write_bytes(FILES[5])
    (sample,) = load_samples(folder, samples=1, seed=0)
    assert sample.id == "gr\\udcfcn.png" and sample.images[0].width == 5


def test_a_line_of_any_length_is_refused_by_its_length(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LINE", 2000)
    file = lines(tmp_path, GOOD, GOOD | {"question": "x" * 3000})
    refused(lambda: load_samples(file, samples=1, seed=0), "line 2", "characters, more than 2,000")


def test_sixteen_bits_take_no_multiple_of_their_bytes():
    pixels = np.random.default_rng(0).integers(0, 65536, (900, 1000), np.uint16)
    data = file_of(Image.fromarray(pixels))
    tracemalloc.start()
    image = open_image(data, "row 1")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (np.asarray(image)[..., 0] == np.rint(pixels / 257)).all()
    assert peak < 8 * pixels.size


LEAF = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["<image>", "<image 1>", "a.png", "\ud800", "data:image/png;base64,xx", "http://x", "user", "text"]
    )
)
KEYS = (
    "role",
    "content",
    "type",
    "image",
    "image_url",
    "text",
    "url",
    "bytes",
    "path",
    "from",
    "value",
    "user",
    "answer",
)
VALUE = st.recursive(
    LEAF, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(KEYS), c, max_size=3), max_leaves=8
)
ROW = st.dictionaries(st.sampled_from(sorted({*layouts._ALL, "image_1", "image_2"})), VALUE, max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ROW | VALUE, min_size=1, max_size=3), st.booleans(), st.booleans(), st.sampled_from([0, 0.9]))
def test_any_row_is_read_or_refused_in_a_line(tmp_path_factory, rows, text, answered, skip):
    """A property: whatever stands in a field, there are samples that can be written as UTF-8, or a `UserError`."""
    file = tmp_path_factory.getbasetemp() / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = {"text": text, "answered": answered, "reading": Reading(skip_bad=skip)}
    try:
        samples = load_samples(file, samples=None, seed=0, **options)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        for sample in samples:
            json.dumps([sample.id, sample.family, sample.conversation()], ensure_ascii=False).encode()

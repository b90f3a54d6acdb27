"""JSON and YAML: what is read, and what is refused in a few words."""

from __future__ import annotations

import json
import os

import pytest

from vlmcompress.utils import json_files, yaml_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.json_files import Unreadable
from vlmcompress.utils.messages import error_text, path_problem, shortened

NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, NaN, null]}', "7", r'"\ud83d\ude00"', "[" * 100 + "]" * 100])
def test_valid_json_is_read(text):
    assert str(json_files.parse_json(text)) == str(json.loads(text)) == str(json_files.parse_json(text.encode()))


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        ("json", NESTED, "nested too deeply"),
        ("json", '{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is given twice"),
        ("json", "[NaN]", "NaN, which is not a number"),
        ("json", "{]", "Expecting"),
        ("yaml", NESTED, "it is not valid YAML: maximum recursion"),
        ("yaml", "a: 1\na: 2", r"it, line 2 is not valid YAML: key 'a' is given twice"),
        ("yaml", "a: [1", "it, line 1 is not valid YAML"),
        ("yaml", "? [a, b]\n: 1\n", "a key is a list or a mapping"),
        ("yaml", "a: 2001-99-99", "it is not valid YAML: month must be in 1..12"),
    ],
)
def test_bad_json_is_refused(parse, text, message):
    with pytest.raises((ValueError, UserError), match=message):
        json_files.parse_json(text, finite=True) if parse == "json" else yaml_files.parse_yaml(text, "it")


def test_yaml_that_repeats_is_read():
    text = "a: &x {b: [1, 1e-4]}\nc: *x\nd:\n  <<: *x\n  e: *x\n"
    inner = {"b": [1, 1e-4]}
    assert yaml_files.parse_yaml(text, "it") == {"a": inner, "c": inner, "d": {**inner, "e": inner}}


def test_special_and_large_files_are_refused(tmp_path):
    """A file is read; a device, a pipe and a file that is too large are refused at once."""
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_text('{"a": "é"}')
    os.mkfifo(pipe)
    assert json_files.read(file) == {"a": "é"}
    for path, message in (("/dev/zero", "a device"), (pipe, "a pipe"), (file, "more than the 3 that")):
        with pytest.raises(Unreadable, match=message):
            json_files.read_bytes(path, 3)
    with pytest.raises(IsADirectoryError):
        json_files.read(tmp_path)


def test_messages_end_with_a_whole_sentence():
    error = ValueError(
        "Validation error for field 'hidden_size':\n    TypeError: expected int, got str (value: 'big')\n"
    )
    assert (
        error_text(error) == "Validation error for field 'hidden_size': TypeError: expected int, got str (value: 'big')"
    )
    assert error_text(ValueError("first line\nsecond line")) == "first line" and error_text(KeyError()) == "KeyError"
    assert error_text(ValueError("It is wrong. " + "Very wrong indeed. " * 30), 40) == "It is wrong. Very wrong indeed"
    assert error_text(ValueError("word " * 100), 30) == "word word word word word ..."
    assert shortened("x" * 2000) == "x" * 2000
    assert len(shortened("x" * 200_000)) <= 2000 and "200,000 characters" in shortened("x" * 200_000)


def test_input_that_is_nested_too_deeply_is_named(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(NESTED)

    def read(path):
        json.loads(path.read_text())

    with pytest.raises(RecursionError) as error:
        read(file)
    assert path_problem(error.value) == f"{file} is nested too deeply, or holds itself; make it flat"
    assert (path_problem(RecursionError()) or "").startswith("a setting is nested")

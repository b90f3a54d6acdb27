"""JSON and YAML of strangers: read within bounds, refused in a few words."""

from __future__ import annotations

import json
import os

import pytest

from vlmcompress.utils import json_files
from vlmcompress.utils import yaml_files as _yaml
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.json_files import DEPTH, Unreadable
from vlmcompress.utils.messages import reason, shortened


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "text", [nested(DEPTH), "[" + "{}," * 300 + '"[[[["]', '{"a": [1, 2.5, NaN, null]}', "7", r'"\ud83d\ude00"']
)
def test_what_is_json(text):
    assert str(json_files.parse(text)) == str(json.loads(text)) == str(json_files.parse(text.encode()))


@pytest.mark.parametrize(
    "text, message",
    [
        (nested(DEPTH + 1), "nested more than 100 deep"),
        (nested(100_000), "nested more than 100 deep"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested more than 100 deep"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is given twice"),
        ('{"id": "a\\ud800"}', "half of a character"),
        ('{"\\uDC00": 1}', "half of a character"),
        ("[NaN]", "NaN, which is no number"),
        ("[-Infinity]", "Infinity, which is no number"),
        ("[1e999]", "1e999, which is too large"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(Unreadable, match=message):
        json_files.parse(text, finite=True)


def test_files(tmp_path):
    """A file is read; a device, a pipe and a file that is too large are refused at once."""
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_text('{"a": "é"}')
    os.mkfifo(pipe)
    assert json_files.read(file) == {"a": "é"}
    for path, message in (("/dev/zero", "a device"), (pipe, "a pipe"), ("a\0b", "NUL"), (file, "more than the 3 that")):
        with pytest.raises(Unreadable, match=message):
            json_files.read_bytes(path, 3)
    with pytest.raises(IsADirectoryError):
        json_files.read(tmp_path)


def test_yaml_that_repeats_is_read():
    text = "a: &x {b: [1, 2]}\nc: *x\nd:\n  <<: *x\n  e: *x\n"
    inner = {"b": [1, 2]}
    assert _yaml.parse(text, "it") == {"a": inner, "c": inner, "d": {**inner, "e": inner}}


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: &x\n  b: *x\n", r"it, line 2 is not valid YAML: '\*x' holds itself"),
        ("&x [1, [*x]]", "holds itself"),
        (nested(100_000), "nested more than 100 deep"),
        (
            "- &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"- &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 12)),
            "unfolds to",
        ),
        ("? [a, b]\n: 1\n", "a key is a list or a mapping"),
        ("a: 2001-99-99", "it is not valid YAML: month must be in 1..12"),
        (f"a: {'9' * 9000}", "it is not valid YAML: .* digits"),
    ],
)
def test_yaml_without_end(text, message):
    with pytest.raises(UserError, match=message):
        _yaml.parse(text, "it")


def test_messages_end_with_a_whole_sentence():
    error = ValueError(
        "Validation error for field 'hidden_size':\n    TypeError: expected int, got str (value: 'big')\n"
    )
    assert reason(error) == "Validation error for field 'hidden_size': TypeError: expected int, got str (value: 'big')"
    assert reason(ValueError("first line\nsecond line")) == "first line" and reason(KeyError()) == "KeyError"
    assert reason(ValueError("It is wrong. " + "Very wrong indeed. " * 30), 40) == "It is wrong. Very wrong indeed"
    assert reason(ValueError("word " * 100), 30) == "word word word word word ..."
    assert shortened("x" * 2000) == "x" * 2000
    assert len(shortened("x" * 200_000)) <= 2000 and "200,000 characters" in shortened("x" * 200_000)

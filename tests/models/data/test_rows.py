"""The dialects of a row. Oracle: what a reader of the row would say that the model is shown, in order."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.kit.pictures import contents, file_of, picture, refused
from vlmcompress.models.data.samples import Sample, to_sample

# Images that tell themselves apart by their width.
FILES = {width: file_of(picture(width, 4)) for width in (5, 6, 7)}


def read(row: dict, folder: Path = Path(".")) -> Sample:
    return to_sample(row, "1", origin="row 1", folder=folder)


def uri(width: int) -> str:
    return "data:image/png;base64," + base64.b64encode(FILES[width]).decode()


QA = [("user", 5, "what?"), ("assistant", "cat")]


@pytest.mark.parametrize(
    "image",
    [FILES[5], [FILES[5]], {"bytes": FILES[5], "path": None}, [{"bytes": FILES[5], "path": "gone.png"}], uri(5)],
)
def test_image_forms(image):
    for column in ("image", "images"):
        assert contents(read({column: image, "question": "what?", "answer": "cat"})) == QA


def test_paths_start_at_the_file(tmp_path):
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "a b.png"
    path.write_bytes(FILES[5])
    for image in ("sub/a b.png", str(path), {"path": "sub/a b.png"}, [{"bytes": None, "path": str(path)}]):
        assert contents(read({"image": image, "question": "what?", "answer": "cat"}, tmp_path)) == QA


@pytest.mark.parametrize("image", [None, [], ""])
def test_text_only(image):
    sample = read({"image": image, "question": "2+2?", "answer": 4})
    assert contents(sample) == [("user", "2+2?"), ("assistant", "4")]
    assert sample.answer == "4" and len(sample.images) == 0


def test_several_images_and_marks():
    row = {"image": [FILES[5], FILES[6]], "question": "which?"}
    assert contents(read(row)) == [("user", 5, 6, "which?")]
    row["question"] = "<image>\nis left, <image> is right. Which?"
    sample = read(row)
    assert contents(sample) == [("user", 5, "is left, ", 6, " is right. Which?")]
    assert sample.question == "is left,  is right. Which?"
    row["question"] = "one <image> for two"  # not one mark per image: left to the family to judge
    assert contents(read(row)) == [("user", 5, 6, "one <image> for two")]


def test_messages_in_the_style_of_openai():
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "first "},
                {"type": "image_url", "image_url": {"url": uri(5)}},
                {"type": "image_url", "image_url": uri(6)},
                {"type": "image", "image": uri(7), "text": None},  # as a table of a union of parts has it
            ],
        },
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ]
    expected = [
        ("system", "be brief"),
        ("user", "first ", 5, 6, 7),
        ("assistant", "a"),
        ("user", "and now?"),
        ("assistant", "b"),
    ]
    for column in (messages, json.dumps(messages)):
        sample = read({"messages": column})
        assert contents(sample) == expected
        assert (sample.question, sample.answer, len(sample.prompt())) == ("and now?", "b", 4)


def test_videos(tmp_path):
    """As files, frames and bytes; in parts and in columns, by marks or without; next to images; refused like images."""
    (tmp_path / "a.mp4").write_bytes(b"film")
    here, text_part = tmp_path / "a.mp4", {"type": "text", "text": "what?"}

    def content(*parts: dict, **columns) -> tuple:
        sample = read({"messages": [{"role": "user", "content": [*parts, text_part]}], **columns}, tmp_path)
        kinds = [part["type"] for part in sample.prompt()[0]["content"]]
        return kinds, [video.source for video in sample.videos], len(sample.images)

    only = (["video", "text"], [here], 0)
    assert content({"type": "video", "video": "a.mp4"}) == only
    assert content({"type": "video", "video": here.as_uri(), "text": None}) == only
    assert content({"type": "video_url", "video_url": {"url": "a.mp4"}}) == only
    assert content({"type": "video"}, video="a.mp4") == content(video="a.mp4") == content(videos=["a.mp4"]) == only
    both = content({"type": "image", "image": uri(5)}, {"type": "video", "video": {"bytes": b"x", "path": None}})
    assert both == (["image", "video", "text"], [b"x"], 1)
    _, [frames], count = content({"type": "video", "video": [FILES[5], uri(6)]})
    assert [frame.width for frame in frames] == [5, 6] and count == 0
    turns = [{"from": "human", "value": "<image> and <video>\nwhich?"}, {"from": "gpt", "value": "b"}]
    marked = read({"image": FILES[5], "video": "a.mp4", "conversations": turns}, tmp_path)
    assert [p["type"] for p in marked.prompt()[0]["content"]] == ["image", "text", "video", "text"] and marked.videos
    refused(lambda: content({"type": "video"}), "show 1 videos without a source, the video column has 0")
    refused(lambda: content({"type": "video", "video": "b.mp4"}), "video 'b.mp4' not found")
    refused(lambda: content({"type": "video", "video": 3}), "a video is a int; give a path")


def test_conversations_of_llava_and_sharegpt():
    """The mark shows where the image is; the last answer is the answer; text alone and JSON text are read, too."""
    turns = [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "Which colour?"},
        {"from": "gpt", "value": "Red."},
    ]
    expected = [("user", 5, "What is it?"), ("assistant", "A cat."), ("user", "Which colour?"), ("assistant", "Red.")]
    for column in (turns, json.dumps(turns)):
        sample = read({"image": FILES[5], "conversations": column})
        assert contents(sample) == expected
        assert (sample.question, sample.answer, len(sample.prompt())) == ("Which colour?", "Red.", 3)
    system = {"from": "system", "value": "be brief"}
    alone = read({"conversations": [system, {"from": "human", "value": "2+2?"}, {"from": "chatgpt", "value": "4"}]})
    assert contents(alone) == [("system", "be brief"), ("user", "2+2?"), ("assistant", "4")]
    openai = [{"role": "user", "content": "hm?"}, {"role": "assistant", "content": "x"}]
    assert contents(read({"image": FILES[6], "conversations": openai})) == [("user", 6, "hm?"), ("assistant", "x")]
    assert contents(read({"image": FILES[6], "messages": openai, "conversations": None})) == [
        ("user", 6, "hm?"),
        ("assistant", "x"),
    ]


def test_messages_take_images_of_the_column():
    part = {"type": "image"}
    column = [FILES[5], FILES[6]]
    ask = {"role": "user", "content": [part, {"type": "text", "text": "x"}, part]}
    assert contents(read({"messages": [ask], "images": column})) == [("user", 5, "x", 6)]
    ask = {"role": "user", "content": "x"}
    before = {"role": "system", "content": "s"}
    assert contents(read({"messages": [before, ask], "images": column})) == [("system", "s"), ("user", 5, 6, "x")]
    again = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a <image>"}]
    again += [{"role": "user", "content": "<image>?"}]
    turns = contents(read({"messages": again, "image": column}))
    assert turns == [("user", 5), ("assistant", "a <image>"), ("user", 6, "?")]
    mixed = {"role": "user", "content": [{"type": "image", "path": uri(7)}, part, {"type": "text", "text": "x"}]}
    assert contents(read({"messages": [mixed], "image": FILES[5]})) == [("user", 7, 5, "x")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": None, "question": " "}, "question is missing or empty"),
        ({"image": None, "question": 3}, "question is not a text"),
        ({"image": None, "question": "x", "answer": ["a", "b"]}, "answer is a list"),
        ({"image": 3.5, "question": "x"}, "an image is a float"),
        ({"image": [""], "question": "x"}, "an image is empty"),
        ({"image": {"bytes": None, "path": None}, "question": "x"}, "an image is empty"),
        ({"image": "gone.png", "question": "x"}, "'gone.png' not found"),
        ({"image": "http://example.org/a.png", "question": "x"}, "nothing is downloaded"),
        ({"messages": []}, "messages is not a list of turns"),
        ({"conversations": []}, "conversations is not a list of turns; give [{'from': 'human', 'value': ...}, ...]"),
        ({"conversations": "[{]"}, "conversations is not valid JSON"),
        ({"conversations": ["x"]}, "conversations has a turn without 'from' and 'value'"),
        ({"conversations": [{"from": "human"}]}, "conversations has a turn without 'from' and 'value'"),
        (
            {"conversations": [{"from": "cat", "value": "x"}]},
            "conversations has a turn from 'cat'; known are human, gpt",
        ),
        ({"conversations": [{"from": "human", "value": ""}]}, "the user message has no content"),
        ({"messages": "[{]"}, "messages is not valid JSON"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'role'"),
        ({"messages": [{"role": "user", "content": None}]}, "no content"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a"}]}]}, "type 'audio'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "1 images without a source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]}]},
            "nothing is downloaded",
        ),
    ],
)
def test_unusable_rows_are_refused(row, message):
    refused(lambda: read(row), "row 1", message)


def test_samples_made_by_hand():
    image = picture()
    sample = Sample("a", (image,), "what?", "cat")
    assert contents(sample) == [("user", 60, "what?"), ("assistant", "cat")]
    sample.prompt()[0]["content"].clear()
    assert contents(sample) == [("user", 60, "what?"), ("assistant", "cat")]

"""Read one row of a data set, in any of several dialects, as one `Sample`.

Columns: `image` (or `images`): nothing, a path, bytes, `{"bytes": ..., "path": ...}` as the `datasets` library stores
an image, or a list of those. `question` and, if known, `answer`; or `messages` in OpenAI's style; or `conversations` as
LLaVA and ShareGPT have them, turns `{"from": "human", "value": ...}`. Optional `id`, `family`.

Which image goes where: a content part that brings its image shows that one; a part without takes the next of the image
column. Where no part does so, the column's images take the places of the `<image>` marks in the texts, as LLaVA's data
has them, if there is one mark per image; otherwise they come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vlmcompress.common import json_files
from vlmcompress.data.images import MAX_PIXELS, LazyImages, from_reference
from vlmcompress.errors import UserError

MARK = "<image>"
ROLES = ("system", "developer", "user", "assistant")
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}  # others as in ROLES
Part = dict[str, Any]  # {"type": "text", "text": ...} or {"type": "image"}; while reading, the latter has a "source"


@dataclass(frozen=True)
class Sample:
    """One conversation about some images.

    Attributes:
        id: unique within its source.
        images: RGB, in the order in which the conversation shows them.
        question: the text of the last user turn.
        answer: the reference answer, or None.
        family: the kind of question, for reports.
        messages: all turns before the answer, for transformers' chat templates: each `content` is a list of
            `{"type": "image"}` and `{"type": "text", "text": ...}`. None: the images, then the question.
        origin: where it was read, e.g. `data.jsonl line 3`, for messages to the user.
        prompted: whether the question is one of ours, as the data have none.
    """

    id: str
    images: Sequence[Image.Image]
    question: str
    answer: str | None = None
    family: str | None = None
    messages: list[dict[str, Any]] | None = None
    origin: str = ""
    prompted: bool = False

    @property
    def name(self) -> str:
        """The sample's name in messages: its origin, or else its id."""
        return self.origin or f"sample '{self.id}'"

    def prompt(self) -> list[dict[str, Any]]:
        """All turns before the answer, in the form of `messages`; a copy that the caller may change."""
        if self.messages is None:
            return [{"role": "user", "content": [*({"type": "image"} for _ in self.images), _text(self.question)]}]
        return [{"role": turn["role"], "content": [dict(part) for part in turn["content"]]} for turn in self.messages]

    def conversation(self) -> list[dict[str, Any]]:
        """All turns: those of `prompt()` and, if there is an answer, the assistant's turn with it."""
        if self.answer is None:
            return self.prompt()
        return [*self.prompt(), {"role": "assistant", "content": [_text(self.answer)]}]


def to_sample(row: dict[str, Any], identity: str, *, origin: str, folder: Path, max_pixels: int = MAX_PIXELS) -> Sample:
    """Read one row.

    Args:
        row: column -> value.
        identity: the sample's id.
        origin: what messages call the row.
        folder: where relative image paths start.
    """
    value = row.get("images") if row.get("images") is not None else row.get("image")
    values = value if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]
    column = [_source(value, folder, origin) for value in values]
    messages = row.get("messages")
    if messages is None and row.get("conversations") is not None:
        messages = _messages(row["conversations"], origin)
    turns = _question(row, origin) if messages is None else _turns(messages, folder, origin)
    _bind(turns, column, origin)
    sources = [part.pop("source") for turn in turns for part in turn["content"] if part["type"] == "image"]
    last = turns.pop()["content"] if turns[-1]["role"] == "assistant" else None
    questions = [_joined(turn["content"]) for turn in turns if turn["role"] == "user"]
    if not questions:
        raise UserError(f"{origin}: messages has no user turn; start with one")
    return Sample(
        id=identity,
        images=LazyImages(sources, origin, max_pixels),
        question=questions[-1],
        answer=None if last is None else _joined(last),
        family=None if row.get("family") is None else str(row["family"]),
        messages=turns,
        origin=origin,
    )


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _joined(parts: list[Part]) -> str:
    return "".join(part["text"] for part in parts if part["type"] == "text")


def _question(row: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    """Read the turns of a row that has columns `question` and `answer`."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip():
        what = "missing or empty" if question is None or isinstance(question, str) else "not a text"
        raise UserError(f"{origin}: question is {what}; write one, or drop the row")
    turns = [{"role": "user", "content": [_text(question)]}]
    if answer is None:
        return turns
    if not isinstance(answer, str | bool | int | float):
        raise UserError(f"{origin}: answer is a {type(answer).__name__}; give one text")
    return [*turns, {"role": "assistant", "content": [_text(str(answer))]}]


def _messages(conversations: Any, origin: str) -> list[Any]:
    """Convert turns of LLaVA's or ShareGPT's style to OpenAI's; turns in that style stay as they are."""
    turns = _parsed(conversations, "conversations", origin)
    named = [turn for turn in turns if isinstance(turn, dict)]
    if len(named) < len(turns) or not all({"from", "value"} <= turn.keys() or "role" in turn for turn in named):
        raise UserError(f"{origin}: conversations has a turn without 'from' and 'value'; write both, or drop the row")
    renamed = [
        {"role": SPEAKERS.get(str(turn["from"]), turn["from"]), "content": turn["value"]} if "from" in turn else turn
        for turn in named
    ]
    if strangers := [turn["role"] for turn in renamed if turn["role"] not in ROLES]:
        raise UserError(f"{origin}: conversations has a turn from '{strangers[0]}'; known are human, gpt and system")
    return renamed


def _parsed(turns: Any, column: str, origin: str) -> list[Any]:
    """Check that a column holds a list of turns, parsing it first if it is JSON text."""
    if isinstance(turns, str):
        try:
            turns = json_files.parse(turns)
        except ValueError as error:
            raise UserError(f"{origin}: {column} is not valid JSON ({error}); give a list of turns") from error
    if not isinstance(turns, list) or not turns:
        style = "{'from': 'human', 'value': ...}" if column == "conversations" else "{'role': 'user', 'content': ...}"
        raise UserError(f"{origin}: {column} is not a list of turns; give [{style}, ...]")
    return turns


def _turns(messages: Any, folder: Path, origin: str) -> list[dict[str, Any]]:
    """Convert OpenAI-style messages to turns; each image part has its own image, or None, under `source`."""
    turns = []
    for message in _parsed(messages, "messages", origin):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UserError(f"{origin}: a message has no 'role' among {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | list) or not content:
            raise UserError(f"{origin}: the {message['role']} message has no content; give a text or a list of parts")
        parts = [_part(part, folder, origin) for part in ([content] if isinstance(content, str) else content)]
        turns.append({"role": message["role"].replace("developer", "system"), "content": parts})
    return turns


def _part(part: Any, folder: Path, origin: str) -> Part:
    if isinstance(part, str):
        return _text(part)
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return _text(part["text"])
    if kind in ("image", "image_url", "input_image"):
        keys = ("image_url", "image", "bytes", "path", "url")
        value = next((part[key] for key in keys if part.get(key) is not None), None)
        return {"type": "image", "source": None if value is None else _source(value, folder, origin)}
    raise UserError(f"{origin}: messages has a part of type '{kind}'; only text, image and image_url are read")


def _source(value: Any, folder: Path, origin: str) -> bytes | Path:
    """Read one image's value, in any of the accepted forms, as bytes or path."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and value:
        return from_reference(value, folder, origin)
    what = "empty" if value is None or value == "" else f"a {type(value).__name__}"
    raise UserError(f"{origin}: an image is {what}; give a path, bytes or a data: URI")


def _bind(turns: list[dict[str, Any]], column: list[bytes | Path], origin: str) -> None:
    """Give the images of the row's column to the parts that wait for one; make such parts if there are none."""
    waiting = [p for turn in turns for p in turn["content"] if p["type"] == "image" and p["source"] is None]
    if column and not waiting:
        waiting = _make_places(turns, len(column))
    if len(waiting) != len(column):
        raise UserError(
            f"{origin}: messages show {len(waiting)} images without a source, the image column has {len(column)}"
        )
    for part, source in zip(waiting, column, strict=True):
        part["source"] = source


def _make_places(turns: list[dict[str, Any]], images: int) -> list[Part]:
    """Add `images` image parts: at the `<image>` marks if there are that many, else first in the first user turn."""
    prompts = [turn for turn in turns if turn["role"] != "assistant"]
    marks = sum(part["text"].count(MARK) for turn in prompts for part in turn["content"] if part["type"] == "text")
    places: list[Part] = [{"type": "image", "source": None} for _ in range(images)]
    if marks != images:
        first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        first["content"] = places + first["content"]
        return places
    rest = iter(places)
    for turn in prompts:
        parts: list[Part] = []
        for part in turn["content"]:
            pieces = [part] if part["type"] == "image" else part["text"].split(MARK)
            for index, piece in enumerate(pieces):
                parts += [next(rest)] if index else []
                if isinstance(piece, dict):
                    parts.append(piece)
                elif text := piece.strip("\n"):  # a line break beside a mark belongs to the mark
                    parts.append(_text(text))
        turn["content"] = parts
    return places

"""Convert rows of public data sets, with their various column names, to the columns that `samples` reads.

Question and answer are looked for in this order:

    messages, conversations      turns in OpenAI's, LLaVA's or ShareGPT's style
    a question (`QUESTIONS`) with an answer (`ANSWERS`), one or a list from several people: ChartQA, DocVQA, TextVQA, VQAv2
    texts pairs `{"user": ..., "assistant": ...}`: the_cauldron prompt, completion (chosen) TRL, as texts or as turns a caption
    (`CAPTIONS`) next to an image, in a table without questions: flickr30k, COCO nothing in a table of images alone; `sources`
    gives each of them a prompt

Columns `A` and `B` (to `H`) next to a question are its options, as in VLMEvalKit's tables, where `category` is the family.

Images are in a column of `IMAGES`, or in `image_1`, `image_2`, ... (MMMU), where `<image 2>` in a text says which one it shows.
Names are case-insensitive. A field in `columns` is read from that column only.
"""

from __future__ import annotations

import ast
import json
import re
import string
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vlmcompress.utils.errors import did_you_mean

FIELDS = ("image", "video", "question", "answer", "messages", "id", "family")
"""Fields for which `columns` can name a column."""
IMAGES = (
    *("decoded_image", "images", "image", "img", "imgs", "picture", "pictures", "photo", "photos"),
    *("image_path", "image_paths", "img_path", "image_file", "image_filename", "file_name", "filename", "image_url"),
    *("image_bytes", "image_data", "image_base64", "image_b64"),
    *("jpg", "jpeg", "png", "webp"),
)
VIDEOS = ("videos", "video")
TURNS = ("messages", "conversations", "conversation")
QUESTIONS = ("question", "query", "problem", "instruction")
ANSWERS = ("answer", "multiple_choice_answer", "answers", "label", "labels", "response", "output", "solution")
TEXTS = ("label", "labels", "response", "output", "solution")
"""Columns of `ANSWERS` that hold answers only if their values are text: numbers are class labels."""
COMPLETIONS = ("completion", "chosen")
CAPTIONS = ("caption", "captions", "text")
CAPTIONED = "What is shown in this image?"
"""The question for a row whose answer is a caption."""
LETTER = "Answer with the option's letter from the given choices directly."
"""What ends a question with options."""
_LETTERS = "ABCDEFGH"
_NUMBERED = re.compile(r"image_?(\d+)", re.IGNORECASE)
_NUMBERED_MARK = re.compile(r"<image (\d+)>")
_ALL = {
    *FIELDS,
    *IMAGES,
    *VIDEOS,
    *TURNS,
    *QUESTIONS,
    *ANSWERS,
    *COMPLETIONS,
    *CAPTIONS,
    "texts",
    "prompt",
    "options",
    "input",
    "keep",
}
_MEDIA_COLUMN = re.compile(r"(img|image|pic|photo|video|frame|file_?name)", re.IGNORECASE)
"""Prefixes of names of columns that probably hold images or videos but are not read."""
Row = dict[str, Any]


def read_of(names: Collection[str], columns: Mapping[str, str]) -> list[str]:
    """The columns of a table that are read, in the table's order."""
    options = [*_LETTERS, "category", "hint"] if {"A", "B"} <= set(names) else []
    return [n for n in names if n.lower() in _ALL or _NUMBERED.fullmatch(n) or n in columns.values() or n in options]


def columns_problem(names: Collection[str], columns: Mapping[str, str], text: bool) -> str | None:
    """Why a table with these columns gives no samples; None if it does.

    Args:
        text: whether samples are text only.
    """
    lower, listed = {name.lower() for name in names}, ", ".join(sorted(names)) or "none"
    for field, column in columns.items():
        if field not in FIELDS:
            return f"is to be read with columns for '{field}', which is no field{did_you_mean(field, FIELDS)}"
        if column not in names:
            return f"has no column '{column}', which columns names for {field}{did_you_mean(column, names)}"
    # What a sample needs: something that asks, and, but for text, something to look at.
    speaks = bool({*TURNS, *QUESTIONS, "texts", "prompt"} & lower or {"question", "messages"} & set(columns))
    pictured = any(name.lower() in IMAGES or _NUMBERED.fullmatch(name) for name in names)
    shows = pictured or bool({*VIDEOS} & lower or {"image", "video"} & set(columns))
    if text:
        if speaks or "text" in lower:
            return None
        return f"needs a column messages, conversations, question or text; found: {listed}"
    example = "name them by columns (--columns image=A,question=B)"
    if not speaks and (not shows or prompted(names, columns) is None):
        needs = "needs a column question (next to image, if there are images), or messages, or conversations"
        return f"{needs}; found: {listed}; {example}"
    unread = sorted(name for name in names if _MEDIA_COLUMN.match(name))
    if unread and not shows and not {*TURNS, "prompt"} & lower and "messages" not in columns:
        return (
            f"has no column image, and '{unread[0]}' is not read; rename it, or name it (--columns image={unread[0]})"
        )
    return None


def prompted(names: Collection[str], columns: Mapping[str, str]) -> str | None:
    """What replaces the questions of a table of images without any: "captions" or "prompts"; None: it has questions."""
    lower = {name.lower() for name in names}
    if {*TURNS, *QUESTIONS, "texts", "prompt"} & lower or {"question", "messages"} & set(columns):
        return None
    if {*CAPTIONS} & lower and "answer" not in columns:
        return "captions"
    answered = {"answer", "answers", "response", "output"} & lower
    return None if answered else "captions" if "answer" in columns else "prompts"


def standard_row(row: Row, columns: Mapping[str, str], question: str | None = None) -> Row:
    """A row with the columns `images`, `videos`, `question`, `answer`, `messages`, `conversations`, `family`, `references` and
    `keep`.

    Args:
        columns: field (of `FIELDS`) -> the column that it is read from.
        question: the question for a row without one.

    For a row with several answers `references` holds them all, and `answer` is the most frequent (the first among equals).
    """
    rest = {str(key).lower(): value for key, value in row.items() if key not in columns.values()}

    def first(field: str, names: Sequence[str]) -> Any:
        """The value of a field: from the column in `columns`, otherwise from the first of `names` that has one."""
        if field in columns:
            return row.get(columns[field])
        values = (
            rest[name] for name in names if rest.get(name) is not None and (name not in TEXTS or _is_text(rest[name]))
        )
        return next(values, None)

    images = first("image", IMAGES)
    turns = first("messages", TURNS)
    standardized: Row = {name: first(name, (name,)) for name in ("family", "keep")} | {"question": question}
    standardized |= (
        {"video": row.get(columns["video"])} if "video" in columns else {name: rest.get(name) for name in VIDEOS}
    )
    # From here on the kinds of public data, the most specific first: turns; the_cauldron's texts; TRL's prompt and
    # completion; question and answer, with Alpaca's `input` and MMBench's options.
    text = first("question", QUESTIONS if question is None else ())
    free = text is None and not {"question", "messages"} & columns.keys()
    if turns is not None:
        standardized["messages" if turns is rest.get("messages") else "conversations"] = turns
    elif free and rest.get("texts") is not None:
        standardized["messages"] = _paired(rest["texts"])
    elif free and isinstance(rest.get("prompt"), str):
        standardized |= {"question": rest["prompt"], **_answered(first("answer", (*COMPLETIONS, *ANSWERS)))}
    elif free and rest.get("prompt") is not None:
        standardized["messages"] = _completed(rest["prompt"], first("answer", COMPLETIONS))
    else:
        answers: Sequence[str] = ANSWERS if question is None else () if question != CAPTIONED else CAPTIONS
        answer = first("answer", answers)
        if isinstance(rest.get("input"), str) and rest.get("instruction") is text and rest["input"].strip():
            text = f"{text}\n{rest['input']}"
        if isinstance(text, str) and (options := _options(row)):
            standardized["family"] = standardized["family"] or row.get("category")
            hint = [row["hint"]] if isinstance(row.get("hint"), str) else []
            text = "\n".join([*hint, text, *options, LETTER])
        standardized |= {
            "question": question if text is None else text,
            **_answered(answer, captions=question == CAPTIONED),
        }
    if images is None and "image" not in columns:
        numbers = {
            int(m[1]): row[name] for name in row if (m := _NUMBERED.fullmatch(str(name))) and row[name] is not None
        }
        if numbers:
            return standardized | _numbered(standardized, numbers, rest.get("options"))
    return standardized | {"images": images}


def _options(row: Row) -> list[str]:
    """A row's options, a line each: `A. red`; none if it has fewer than two."""
    filled = [(letter, row[letter]) for letter in _LETTERS if row.get(letter) not in (None, "")]
    return (
        [f"{letter}. {option}" for letter, option in filled]
        if [letter for letter, _ in filled][:2] == ["A", "B"]
        else []
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(isinstance(item, str) for item in value))


def _answered(value: Any, captions: bool = False) -> Row:
    """The columns `answer` and `references` of a value that may be one answer or several."""
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):  # SQuAD's
        value = value["text"]
    if not isinstance(value, list):
        return {"answer": value}
    texts = [item.get("answer") if isinstance(item, Mapping) else item for item in value]
    texts = [item for item in texts if isinstance(item, str) and item.strip()]
    if not value:
        return {"answer": None}
    if not texts:
        return {"answer": value}  # `samples` refuses it by its type
    best = texts[0] if captions else Counter(texts).most_common(1)[0][0]
    return {"answer": best, "references": tuple(dict.fromkeys(texts))}


def _paired(texts: Any) -> Any:
    """The turns of the_cauldron's `texts`; other values unchanged, for `samples` to refuse."""
    if not isinstance(texts, list) or not all(isinstance(pair, Mapping) and "user" in pair for pair in texts):
        return texts
    return [
        {"role": role, "content": pair[key]}
        for pair in texts
        for role, key in (("user", "user"), ("assistant", "assistant"))
        if pair.get(key) is not None
    ]


def _completed(prompt: Any, completion: Any) -> Any:
    """The turns of TRL's `prompt` followed by its `completion`, which may be turns or text."""
    if isinstance(prompt, list) and isinstance(completion, str):
        return [*prompt, {"role": "assistant", "content": completion}]
    return prompt + completion if isinstance(prompt, list) and isinstance(completion, list) else prompt


def _numbered(row: Row, images: Mapping[int, Any], options: Any) -> Row:
    """The columns of a row with numbered images, to which `<image 2>` in its question or options refers."""
    text = row.get("question")
    if not isinstance(text, str) or row.get("messages") is not None or row.get("conversations") is not None:
        return {"images": [images[number] for number in sorted(images)]}
    if isinstance(options, str):
        try:
            options = ast.literal_eval(options)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            options = None
    if isinstance(options, list) and options:
        letters = zip(string.ascii_uppercase, map(str, options), strict=False)
        text = "\n".join([text, "", *(f"({letter}) {option}" for letter, option in letters)])
    parts: list[Any] = []
    left = dict(images)
    for index, piece in enumerate(_NUMBERED_MARK.split(text)):
        if index % 2 == 0:
            parts += [piece] if piece else []
        elif (number := int(piece)) in left:
            parts.append({"type": "image", "image": left.pop(number)})
        else:
            parts.append(f"<image {number}>" if number not in images else f"image {number}")
    turns = [{"role": "user", "content": [*({"type": "image", "image": left[n]} for n in sorted(left)), *parts]}]
    if row.get("answer") is not None:
        answer = row["answer"]
        turns.append({"role": "assistant", "content": answer if isinstance(answer, str) else json.dumps(answer)})
    return {"messages": turns, "images": None, "question": text}

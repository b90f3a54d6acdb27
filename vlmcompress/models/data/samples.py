"""Read one row of a data set, in any of several formats, as a `Sample`, whose images are opened as 8-bit RGB.

Columns (`layouts` converts those of public data sets): `image` (or `images`): nothing, a path, bytes, base64, `{"bytes": ...,
"path": ...}` as the `datasets` library stores an image, or a list of those. `video` (or `videos`, a list): the same of a
video's file, or a list of images, its frames. `question` and, if known, `answer`; or `messages` in OpenAI's style; or
`conversations` as LLaVA and ShareGPT have them, turns `{"from": "human", "value": ...}`. Optional `id`, `family`,
`keep` (the share of visual tokens, for a reducer with `keep_max`).

Which image or video goes where: a content part with a source shows that one; a part without one takes the column's next. If
there are no such parts, the column's images replace the `<image>` marks in the texts (videos: `<video>`), as in LLaVA's data,
if there are as many marks; otherwise they come first.

Files are not trusted. The model gets what a viewer would show: EXIF rotation is applied, transparency is composited on white;
palettes, CMYK, grayscale and 16 bits per channel are converted (Pillow would clip 16-bit gray to white instead of scaling it).
Of an animation the first frame is used. Only the formats of `utils.images` are opened. An image that cannot be decoded raises a
`BadSample` that names it: leaving it out would change the data.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload
from urllib.parse import unquote, unquote_to_bytes, urlparse

import numpy as np
from PIL import Image, ImageOps

from vlmcompress.models.data.video import Video
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import BadSample
from vlmcompress.utils.images import FORMATS, open_raster
from vlmcompress.utils.messages import error_text

MARK = "<image>"
ROLES = ("system", "developer", "user", "assistant")
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}  # others as in ROLES
Part = dict[str, Any]  # {"type": "text", "text": ...}, {"type": "image"} or "video", with a "source" while reading
_ENCODED = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*", b"\x1aE\xdf\xa3")
"""First bytes of image and video files; MP4 and related formats have `ftyp` at offset 4."""


class LazyImages(Sequence[Image.Image]):
    """Images that are decoded on each access, so that a list of samples takes only the memory of their files.

    Args:
        sources: encoded bytes or a path, per image.
        origin: where the images were named, e.g. `data.jsonl row 3`; error messages begin with it.
    """

    def __init__(self, sources: Sequence[bytes | Path], origin: str):
        self._sources = tuple(sources)
        self._origin = origin

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...
    @overload
    def __getitem__(self, index: slice) -> list[Image.Image]: ...
    def __getitem__(self, index: int | slice) -> Image.Image | list[Image.Image]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return open_image(self._sources[index], self._name(index))

    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of each image as stored, before EXIF rotation; nothing is decoded."""
        sizes = []
        for index, source in enumerate(self._sources):
            with _opened(*_content(source, self._name(index))) as image:
                sizes.append(image.size)
        return sizes

    def open_all(self, decode: bool = True) -> int:
        """Open all images, or with `decode` decode them; returns the bytes of their files. Raises BadSample if one fails."""
        size = 0
        for index, source in enumerate(self._sources):
            what, data = _content(source, self._name(index))
            size += len(data)
            if decode:
                _decoded(what, data)
            else:
                _opened(what, data).close()
        return size

    def _name(self, index: int) -> str:
        number = f", image {range(len(self))[index] + 1}" if len(self) > 1 else ""
        return f"{self._origin}{number}"


def open_image(source: bytes | Path, origin: str) -> Image.Image:
    """Decode one image, given as encoded bytes or a path, to RGB. `origin`: its name in error messages."""
    return _decoded(*_content(source, origin))


def _content(source: bytes | Path, origin: str) -> tuple[str, bytes]:
    """An image's name in messages, and its encoded bytes."""
    what = f"{origin}: image" if isinstance(source, bytes) else f"{origin}: image '{source}'"
    data = source if isinstance(source, bytes) else _read(source, what)
    if not data:
        raise BadSample(f"{what} is empty (0 bytes); replace the file or drop the row")
    return what, data


def _opened(what: str, data: bytes) -> Image.Image:
    """Open an image without decoding pixels."""
    try:
        return open_raster(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise BadSample(f"{what} is too large ({error_text(error)}); shrink it or drop the row") from error
    except Exception as error:  # decoders raise anything on damaged data
        kinds = ", ".join(FORMATS)
        raise BadSample(f"{what} is not an image in one of {kinds}; convert it to PNG or drop the row") from error


def _decoded(what: str, data: bytes) -> Image.Image:
    image = _opened(what, data)
    try:
        with image:
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:
        raise BadSample(f"{what} cannot be decoded ({error_text(error)}); replace the file or drop the row") from error


def from_reference(text: str, folder: Path, origin: str, kind: str = "image") -> bytes | Path:
    """Resolve a value of an image column or `image_url`: a path (relative to `folder`, or absolute), `data:` or `file:` URI, or
    the file itself in base64."""
    scheme = text.partition(":")[0].lower() if ":" in text[:8] else ""
    if scheme in ("http", "https"):
        raise BadSample(f"{origin}: {kind} is a web address ({text[:80]}), and nothing is downloaded; save its file")
    if scheme == "data":
        return _data_uri(text, origin, kind)
    if scheme == "file":
        text = unquote(urlparse(text).path)
    # A file before base64: short names of files are valid base64, too.
    path = folder / text
    try:
        if "\0" not in text and path.exists():
            return path
    except OSError:  # not a possible file name
        pass
    if (data := _plain_base64(text)) is not None:
        return data
    label = text if len(text) <= 200 else f"{text[:80]}...' of {len(text):,} characters"
    raise BadSample(
        f"{origin}: {kind} '{label}{'' if len(text) > 200 else chr(39)} not found; relative paths start at {folder}"
    )


def _plain_base64(text: str) -> bytes | None:
    """The bytes of a base64 text; None if they are not an image or video file."""
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (ValueError, binascii.Error):
        return None
    # Many words decode as base64; only what begins like an image or film is one.
    return data if data.startswith(_ENCODED) or data[4:8] == b"ftyp" else None


def _data_uri(uri: str, origin: str, kind: str) -> bytes:
    """Decode the bytes of a URI such as `data:image/png;base64,....`"""
    header, comma, body = uri.partition(",")
    try:
        if not comma:
            raise ValueError("no comma")
        return base64.b64decode(unquote(body), validate=True) if "base64" in header else unquote_to_bytes(body)
    except (ValueError, binascii.Error) as error:
        raise BadSample(f"{origin}: {kind} has a malformed data: URI ({error}); encode the file with base64") from error


def _read(path: Path, what: str) -> bytes:
    try:
        return json_files.read_bytes(path)
    except json_files.Unreadable as error:
        raise BadSample(f"{what} cannot be read: {error}; give an image file") from error
    except OSError as error:
        raise BadSample(f"{what} cannot be read ({error.strerror}); check the path and its permissions") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # more than 8 bits per channel
        full = 65535.0 if image.mode.startswith("I;16") else None
        return Image.fromarray(_to_8_bit(np.asarray(image), full)).convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    # A viewer shows transparent pixels on its page; `convert` alone would show the colour that hides below them.
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _to_8_bit(values: np.ndarray, full: float | None) -> np.ndarray:
    """Scale gray values [height, width] to uint8. `full` becomes white; None: the smallest of 1, 255, 65535 that holds all."""
    if not np.isfinite(values).all():
        raise ValueError("it has NaN or infinite pixels")
    if full is None:
        top = float(values.max(initial=0.0))
        fractions = not np.issubdtype(values.dtype, np.integer) and bool((values % 1).any())
        limits = (1.0, 255.0, 65535.0) if fractions else (255.0, 65535.0)
        full = next((limit for limit in limits if top <= limit), top)
    gray = np.empty(values.shape, np.uint8)
    for row, line in enumerate(values):  # row by row, as float64 takes eight times the image's bytes
        gray[row] = np.clip(np.rint(line.astype(np.float64) * (255.0 / full)), 0, 255)
    return gray


@dataclass(frozen=True)
class Sample:
    """One conversation about some images and videos.

    Attributes:
        id: unique within its source.
        images: RGB, in the order in which the conversation shows them.
        question: the text of the last user turn.
        answer: the reference answer, or None.
        family: the kind of question, for reports.
        messages: all turns before the answer, for transformers' chat templates: each `content` is a list of
            `{"type": "image"}`, `{"type": "video"}` and `{"type": "text", "text": ...}`. None: the images, then the question.
        origin: where it was read, e.g. `data.jsonl line 3`, for messages to the user.
        prompted: whether the question is a default prompt, as the data have none.
        videos: in the order in which the conversation shows them.
        references: several people's answers, including `answer`; empty if the data have one answer.
        row_id: the id in the data; None if there is none.
        keep: the share, or number, of its images' tokens that a reducer keeps, checked by the engine; None: the reducer's own.
    """

    id: str
    images: Sequence[Image.Image]
    question: str
    answer: str | None = None
    family: str | None = None
    messages: list[dict[str, Any]] | None = None
    origin: str = ""
    prompted: bool = False
    videos: Sequence[Video] = ()
    references: tuple[str, ...] = ()
    row_id: str | None = None
    keep: Any = None

    @property
    def visual(self) -> bool:
        """Whether it has images or videos."""
        return bool(self.images or self.videos)

    @property
    def name(self) -> str:
        """The sample's name in messages: its origin or, without one, its id."""
        return self.origin or f"sample '{self.id}'"

    def prompt(self) -> list[dict[str, Any]]:
        """All turns before the answer, in the form of `messages`; a copy that the caller may change."""
        if self.messages is None:
            kinds = ["image"] * len(self.images) + ["video"] * len(self.videos)
            return [{"role": "user", "content": [*({"type": kind} for kind in kinds), _text(self.question)]}]
        return [{"role": turn["role"], "content": [dict(part) for part in turn["content"]]} for turn in self.messages]

    def conversation(self) -> list[dict[str, Any]]:
        """All turns: those of `prompt()` and, if there is an answer, the assistant's turn with it."""
        if self.answer is None:
            return self.prompt()
        return [*self.prompt(), {"role": "assistant", "content": [_text(self.answer)]}]


def to_sample(row: dict[str, Any], identity: str, *, origin: str, folder: Path) -> Sample:
    """Read one row.

    Args:
        row: column -> value.
        identity: the sample's id.
        origin: the row's name in messages.
        folder: base of relative image paths.

    Raises:
        BadSample: the row is malformed, or one of its files cannot be read.
    """
    value = row.get("images") if row.get("images") is not None else row.get("image")
    values = value if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]
    videos = row["videos"] if row.get("videos") is not None else [row["video"]] if row.get("video") else []
    videos = videos if isinstance(videos, list | tuple) else [videos]
    messages = row.get("messages")
    if messages is None and row.get("conversations") is not None:
        messages = _messages(row["conversations"], origin)
    turns = _question(row, origin) if messages is None else _turns(messages, folder, origin)
    # Columns fill the places that the turns leave open; after that every image and video has a source.
    _bind(turns, [media_source(value, folder, origin) for value in values], origin)
    _bind(turns, [_video(value, folder, origin) for value in videos], origin, "video")
    media = [part for turn in turns for part in turn["content"] if part["type"] != "text"]
    sources = {kind: [part.pop("source") for part in media if part["type"] == kind] for kind in ("image", "video")}
    # A last turn of the assistant is the answer that is scored; earlier ones are part of the prompt.
    last = turns.pop()["content"] if turns[-1]["role"] == "assistant" else None
    questions = [_joined(turn["content"]) for turn in turns if turn["role"] == "user"]
    if not questions:
        raise BadSample(f"{origin}: messages has no user turn; start with one")
    answer, family = None if last is None else _joined(last), None if row.get("family") is None else str(row["family"])
    texts = [_joined(turn["content"]) for turn in turns]
    if not _encodable("".join([*texts, answer or "", family or ""])):
        raise BadSample(
            f"{origin}: a text of it is no Unicode (half of a surrogate pair); write it again, or drop the row"
        )
    keep = row.get("keep")
    if isinstance(keep, str):  # of a table of text; what is no number stays, for the engine to refuse
        with contextlib.suppress(ValueError):
            keep = float(keep)
    return Sample(
        id=identity,
        images=LazyImages(sources["image"], origin),
        question=questions[-1],
        answer=answer,
        family=family,
        messages=turns,
        origin=origin,
        videos=tuple(sources["video"]),
        references=tuple(row.get("references") or ()),
        keep=keep,
    )


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8. JSON can encode lone surrogates, and file names can be any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _joined(parts: list[Part]) -> str:
    return "".join(part["text"] for part in parts if part["type"] == "text")


def _question(row: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    """Read the turns of a row that has columns `question` and `answer`."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip():
        what = "missing or empty" if question is None or isinstance(question, str) else "not a text"
        raise BadSample(f"{origin}: question is {what}; write one, or drop the row")
    turns = [{"role": "user", "content": [_text(question)]}]
    if answer is None:
        return turns
    if not isinstance(answer, str | bool | int | float):
        raise BadSample(f"{origin}: answer is a {type(answer).__name__}; give one text")
    return [*turns, {"role": "assistant", "content": [_text(str(answer))]}]


def _messages(conversations: Any, origin: str) -> list[Any]:
    """Convert turns of LLaVA's or ShareGPT's style to OpenAI's; turns in that style stay as they are."""
    turns = _parsed(conversations, "conversations", origin)
    named = [turn for turn in turns if isinstance(turn, dict)]
    if len(named) < len(turns) or not all({"from", "value"} <= turn.keys() or "role" in turn for turn in named):
        raise BadSample(f"{origin}: conversations has a turn without 'from' and 'value'; write both, or drop the row")
    renamed = [
        {"role": SPEAKERS.get(str(turn["from"]), turn["from"]), "content": turn["value"]} if "from" in turn else turn
        for turn in named
    ]
    # A turn of an unknown speaker would be dropped or taken for the user's by the templates.
    if strangers := [turn["role"] for turn in renamed if turn["role"] not in ROLES]:
        raise BadSample(f"{origin}: conversations has a turn from '{strangers[0]}'; known are human, gpt and system")
    return renamed


def _parsed(turns: Any, column: str, origin: str) -> list[Any]:
    """Check that a column holds a list of turns, parsing it first if it is JSON text."""
    if isinstance(turns, str):
        try:
            turns = json_files.parse_json(turns)
        except ValueError as error:
            raise BadSample(f"{origin}: {column} is not valid JSON ({error}); give a list of turns") from error
    if not isinstance(turns, list) or not turns:
        style = "{'from': 'human', 'value': ...}" if column == "conversations" else "{'role': 'user', 'content': ...}"
        raise BadSample(f"{origin}: {column} is not a list of turns; give [{style}, ...]")
    return turns


def _turns(messages: Any, folder: Path, origin: str) -> list[dict[str, Any]]:
    """Convert OpenAI-style messages to turns; each image part has its own image, or None, under `source`."""
    turns = []
    for message in _parsed(messages, "messages", origin):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadSample(f"{origin}: a message has no 'role' among {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | list) or not content:
            raise BadSample(f"{origin}: the {message['role']} message has no content; give a text or a list of parts")
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
        return {"type": "image", "source": None if value is None else media_source(value, folder, origin)}
    if kind in ("video", "video_url", "input_video"):
        value = next((part[key] for key in (kind, "video", "path", "url") if part.get(key) is not None), None)
        return {"type": "video", "source": None if value is None else _video(value, folder, origin)}
    raise BadSample(f"{origin}: messages has a part of type '{kind}'; only text, image, video and such are read")


def _video(value: Any, folder: Path, origin: str) -> Video:
    """Read one video's value: a file in any of the accepted forms, or a list of images."""
    if isinstance(value, list | tuple):
        return Video(
            LazyImages([media_source(frame, folder, origin) for frame in value], f"{origin}: video frames"), origin
        )
    return Video(media_source(value, folder, origin, "video"), origin)


def media_source(value: Any, folder: Path, origin: str, kind: str = "image") -> bytes | Path:
    """Read one file's value, in any of the accepted forms, as bytes or path."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and value:
        return from_reference(value, folder, origin, kind)
    what = "empty" if value is None or value == "" else f"a {type(value).__name__}"
    raise BadSample(f"{origin}: {'an' if kind == 'image' else 'a'} {kind} is {what}; give a path, bytes or a data: URI")


def _bind(turns: list[dict[str, Any]], column: Sequence[Any], origin: str, kind: str = "image") -> None:
    """Assign a row's images or videos to the parts without a source; add parts if there are none. BadSample if too few."""
    waiting = [p for turn in turns for p in turn["content"] if p["type"] == kind and p["source"] is None]
    # Turns without parts for them: the column says how many there are, marks in the text say where.
    if column and not waiting:
        waiting = _make_places(turns, len(column), kind)
    if len(waiting) != len(column):
        raise BadSample(
            f"{origin}: messages show {len(waiting)} {kind}s without a source, the {kind} column has {len(column)}"
        )
    for part, source in zip(waiting, column, strict=True):
        part["source"] = source


def _make_places(turns: list[dict[str, Any]], count: int, kind: str) -> list[Part]:
    """Add `count` parts of a kind: at its marks (`<image>`) if there are that many, else at the start of the first user
    turn."""
    mark = MARK.replace("image", kind)
    prompts = [turn for turn in turns if turn["role"] != "assistant"]
    marks = sum(part["text"].count(mark) for turn in prompts for part in turn["content"] if part["type"] == "text")
    places: list[Part] = [{"type": kind, "source": None} for _ in range(count)]
    if marks != count:
        first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        first["content"] = places + first["content"]
        return places
    rest = iter(places)
    for turn in prompts:
        parts: list[Part] = []
        for part in turn["content"]:
            pieces = part["text"].split(mark) if part["type"] == "text" else [part]
            for index, piece in enumerate(pieces):
                parts += [next(rest)] if index else []
                if isinstance(piece, dict):
                    parts.append(piece)
                elif text := piece.strip("\n"):  # a line break next to a mark is part of the mark
                    parts.append(_text(text))
        turn["content"] = parts
    return places

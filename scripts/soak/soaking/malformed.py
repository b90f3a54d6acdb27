"""Requests that no server should accept, each of which it should refuse with a status from 400 to 499.

`UNCAUGHT` are those that vLLM 0.32 answers with 500, whatever the model, because it does not catch the error of the library
that reads the address or the image. They are sent all the same: they must not harm the requests beside them.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

from soaking.traffic import MOST_IMAGES, part

Body = dict[str, Any]
UNCAUGHT = {"huge image", "local file", "no such host"}


def bodies(model: str) -> dict[str, bytes]:
    """Make malformed requests: what is wrong -> body."""
    return {what.__name__.replace("_", " "): what(model) for what in KINDS}


def _ask(model: str, *content: Body, **settings: Any) -> bytes:
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What is this?"}]}]
    return json.dumps({"model": model, "messages": messages, "max_completion_tokens": 4, **settings}).encode()


def _picture() -> bytes:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((96, 96)).save(buffer, "PNG")
    return buffer.getvalue()


def _address(url: str) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


def no_json(model: str) -> bytes:
    return _ask(model)[:-7]


def no_messages(model: str) -> bytes:
    return json.dumps({"model": model}).encode()


def empty_messages(model: str) -> bytes:
    return json.dumps({"model": model, "messages": []}).encode()


def unknown_model(model: str) -> bytes:
    return _ask(model + "-of-somebody-else")


def unknown_part(model: str) -> bytes:
    return _ask(model, {"type": "hologram", "hologram": "x"})


def image_without_address(model: str) -> bytes:
    return _ask(model, {"type": "image_url"})


def no_base64(model: str) -> bytes:
    return _ask(model, _address("data:image/png;base64,*** not base64 ***"))


def empty_image(model: str) -> bytes:
    return _ask(model, part(b""))


def text_as_image(model: str) -> bytes:
    return _ask(model, part(b"This is no picture.\n" * 50))


def cut_off_image(model: str) -> bytes:
    return _ask(model, part(_picture()[:-200]))


def damaged_image(model: str) -> bytes:
    """Make a request with a PNG whose header has a wrong checksum."""
    data = bytearray(_picture())
    data[16] ^= 1
    return _ask(model, part(bytes(data)))


def huge_image(model: str) -> bytes:
    """Make a request with a PNG of a few bytes whose header claims 40,000 x 40,000 pixels."""
    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    framed = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return _ask(model, part(b"\x89PNG\r\n\x1a\n" + b"".join(framed)))


def local_file(model: str) -> bytes:
    return _ask(model, _address("file:///etc/passwd"))


def unknown_scheme(model: str) -> bytes:
    return _ask(model, _address("gopher://127.0.0.1/image.png"))


def no_such_host(model: str) -> bytes:
    return _ask(model, _address("http://127.0.0.1:9/image.png"))


def too_many_images(model: str) -> bytes:
    return _ask(model, *[part(_picture())] * (MOST_IMAGES + 1))


def too_long(model: str) -> bytes:
    return _ask(model, {"type": "text", "text": "red blue green " * 10_000})


def negative_temperature(model: str) -> bytes:
    return _ask(model, temperature=-1.0)


def no_tokens_wanted(model: str) -> bytes:
    return _ask(model, max_completion_tokens=-5)


def a_video(model: str) -> bytes:
    return _ask(model, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}})


KINDS: tuple[Callable[[str], bytes], ...] = (
    no_json,
    no_messages,
    empty_messages,
    unknown_model,
    unknown_part,
    image_without_address,
    no_base64,
    empty_image,
    text_as_image,
    cut_off_image,
    damaged_image,
    huge_image,
    local_file,
    unknown_scheme,
    no_such_host,
    too_many_images,
    too_long,
    negative_temperature,
    no_tokens_wanted,
    a_video,
)

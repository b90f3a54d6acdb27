"""Requests that no server should accept, each of which it should refuse with a status from 400 to 499.

`UNCAUGHT` are those that vLLM 0.32 answers with 500, whatever the model, because it does not catch the error of the library
that reads the address or the image. They are sent all the same: they must not harm the requests beside them.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from typing import Any

from PIL import Image

from soaking.traffic import MOST_IMAGES, part

UNCAUGHT = {"huge image", "local file", "no such host"}


def bodies(model: str) -> dict[str, bytes]:
    """Make malformed requests: what is wrong -> body."""
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((96, 96)).save(buffer, "PNG")
    picture, damaged = buffer.getvalue(), bytearray(buffer.getvalue())
    damaged[16] ^= 1  # the checksum of the PNG's header is wrong

    def ask(*content: dict[str, Any], **settings: Any) -> bytes:
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What is this?"}]}]
        return json.dumps({"model": model, "messages": messages, "max_completion_tokens": 4, **settings}).encode()

    def address(url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    return {
        "no json": ask()[:-7],
        "no messages": json.dumps({"model": model}).encode(),
        "empty messages": json.dumps({"model": model, "messages": []}).encode(),
        "unknown model": ask(model=f"{model}-of-somebody-else"),
        "unknown part": ask({"type": "hologram", "hologram": "x"}),
        "image without address": ask({"type": "image_url"}),
        "no base64": ask(address("data:image/png;base64,*** not base64 ***")),
        "empty image": ask(part(b"")),
        "text as image": ask(part(b"This is no picture.\n" * 50)),
        "cut off image": ask(part(picture[:-200])),
        "damaged image": ask(part(bytes(damaged))),
        "huge image": ask(part(_huge())),
        "local file": ask(address("file:///etc/passwd")),
        "unknown scheme": ask(address("gopher://127.0.0.1/image.png")),
        "no such host": ask(address("http://127.0.0.1:9/image.png")),
        "too many images": ask(*[part(picture)] * (MOST_IMAGES + 1)),
        "too long": ask({"type": "text", "text": "red blue green " * 10_000}),
        "negative temperature": ask(temperature=-1.0),
        "no tokens wanted": ask(max_completion_tokens=-5),
        "a video": ask({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}),
    }


def _huge() -> bytes:
    """A PNG of a few bytes whose header claims 40,000 x 40,000 pixels."""
    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    framed = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)

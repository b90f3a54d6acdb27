"""Read Qt's resource files (`.rcc`), in which GCompris ships its pictures.

A file has a header, a tree of folders and files whose nodes have 14 bytes (22 from version 2 on), names in UTF-16, and contents
with their length in front, some of them compressed by zlib or Zstandard (doc.qt.io/qt-6/resources.html; Qt's `qresource.cpp`).
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

COMPRESSED, FOLDER, ZSTANDARD = 1, 2, 4


def content(path: Path, file: str) -> bytes:
    """The content of the one file in the resource file `path` whose name ends in `/` and `file`.

    Raises:
        ValueError: `path` is no such file or cut off, has not one such file, or that is compressed by Zstandard.
    """
    data = path.read_bytes()
    try:
        ((flags, start),) = (place for name, *place in _files(data) if name.endswith(f"/{file}"))
        (length,) = struct.unpack_from(">I", data, start)
    except (struct.error, ValueError) as error:
        raise ValueError(f"no resource file with one {file}") from error
    body = data[start + 4 : start + 4 + length]
    if flags & ZSTANDARD or len(body) < length:
        raise ValueError(f"{file} is cut off or compressed by Zstandard")
    return zlib.decompress(body[4:]) if flags & COMPRESSED else body


def _files(data: bytes, node: int = 0, parent: str = "") -> Iterator[tuple[str, int, int]]:
    """Names, flags and places of contents of all files below a node."""
    magic, version, tree, contents, names = struct.unpack_from(">4s4I", data)
    if magic != b"qres":
        raise ValueError("not a resource file")
    at = tree + node * (14 if version == 1 else 22)
    name_at, flags = struct.unpack_from(">IH", data, at)
    (length,) = struct.unpack_from(">H", data, names + name_at) if node else (0,)
    name = f"{parent}/{data[names + name_at + 6 :][: 2 * length].decode('utf-16-be')}" if node else ""
    if flags & FOLDER:
        children, first = struct.unpack_from(">II", data, at + 6)
        for child in range(first, first + children):
            yield from _files(data, child, name)
    else:
        yield name, flags, contents + struct.unpack_from(">I", data, at + 10)[0]

"""Read untrusted files and JSON, within bounds.

A path may name an endless device, a pipe that never answers or a file of a terabyte; a JSON text may be nested until Python's
stack overflows, give a key twice (readers differ in which value they take) or hold a NaN. All of these raise `Unreadable`, a
`ValueError` whose short text says what is wrong; the caller adds which file it is and what to do.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

DEPTH = 100
"""The most lists and objects that may be nested within each other."""
LARGEST = 2 << 30
"""The most bytes of a file that is read at once: data sets as JSON lines, and reports with pictures, may be large."""
LARGEST_CONFIG = 64 << 20
"""The most bytes of a config or index; the largest seen are indices of 2 MB."""


class Unreadable(ValueError):
    """Raised for a file or text that is refused. The message says why, in a few words without the file's name."""


def read_bytes(path: str | Path, largest: int = LARGEST) -> bytes:
    """The content of a regular file of at most `largest` bytes.

    Raises:
        Unreadable: not a regular file, larger, or a path that no file can have.
        OSError: it is not there, or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its other end
    except ValueError as error:
        raise Unreadable("its name holds a NUL character") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("it is a device or a pipe, not a file")
        if status.st_size > largest:
            raise Unreadable(f"it has {status.st_size:,} bytes, more than the {largest:,} that are read")
        return file.read(largest + 1)[:largest]


def read_text(path: str | Path, largest: int = LARGEST, encoding: str = "utf-8") -> str:
    """The text of a regular file, as `read_bytes` reads it. `UnicodeDecodeError`, a ValueError, where it is none."""
    return read_bytes(path, largest).decode(encoding)


def read(path: str | Path, largest: int = LARGEST_CONFIG, *, finite: bool = False) -> Any:
    """The JSON value in a file; see `parse`. Raises OSError and ValueError (`Unreadable` is one)."""
    return parse(read_text(path, largest), finite=finite)


def parse(text: str | bytes, *, finite: bool = False, once: bool = True) -> Any:
    """The value of a JSON text.

    Args:
        finite: refuse NaN, Infinity and numbers that are too large for a float.
        once: refuse an object that gives a key twice.

    Raises:
        ValueError: not JSON, or one of what is refused, or nested more than `DEPTH` deep, or with a text that is none.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _object} if once else {}
    if finite:
        hooks |= {"parse_constant": _constant, "parse_float": _float}
    try:
        value = json.loads(text, **hooks)
    except RecursionError as error:
        raise Unreadable(f"it is nested more than {DEPTH} deep") from error
    _check_depth(value, text)
    if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():  # type: ignore[operator]
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Unreadable("it holds half of a character, which no UTF-8 can") from error
    return value


def _check_depth(value: Any, text: str | bytes) -> None:
    """Refuse a value nested more than `DEPTH` deep, which would end a later recursive reader."""
    opened = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, opened)) <= DEPTH:  # type: ignore[arg-type]
        return
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > DEPTH:
            raise Unreadable(f"it is nested more than {DEPTH} deep")
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise Unreadable(f"key '{twice[:80]}' is given twice")
    return mapping


def _constant(name: str) -> NoReturn:
    raise Unreadable(f"it holds {name}, which is no number")


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise Unreadable(f"it holds {text[:40]}, which is too large for a number")
    return value

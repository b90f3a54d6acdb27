"""Read files and JSON with limits. `Unreadable` is a `ValueError` with a short reason, to which the caller adds the file's name
and the remedy."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 2 << 30
"""Maximum bytes of a file that is read at once; data sets as JSON lines and reports with pictures may be large."""


class Unreadable(ValueError):
    """A file or text that is refused. The message is a short reason without the file's name."""


def read_bytes(path: str | Path, largest: int = LARGEST) -> bytes:
    """The content of a regular file. Raises OSError, and `Unreadable` for other kinds or more than `largest` bytes."""
    if "\0" in str(path):
        raise Unreadable("its name holds a NUL character")
    status = Path(path).stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # a folder is refused by `open`
        raise Unreadable("it is a device or a pipe, not a file")
    if status.st_size > largest:
        raise Unreadable(f"it has {status.st_size:,} bytes, more than the {largest:,} that are read")
    return Path(path).read_bytes()


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """The text of a file. Raises as `read_bytes`, and `UnicodeDecodeError` (a ValueError) for a wrong encoding."""
    return read_bytes(path).decode(encoding)


def read(path: str | Path, *, finite: bool = False) -> Any:
    """The JSON value in a file; see `parse_json`. Raises OSError and ValueError (`Unreadable` is one)."""
    return parse_json(read_text(path), finite=finite)


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        finite: refuse NaN and Infinity.

    Raises:
        ValueError: not JSON, nested too deeply, or an object with a duplicate key, of which readers take different values.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_not_finite if finite else None)
    except RecursionError as error:
        raise Unreadable("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise Unreadable(f"key '{twice[:80]}' is given twice")
    return mapping


def _not_finite(name: str) -> NoReturn:
    raise Unreadable(f"it holds {name}, which is not a number")

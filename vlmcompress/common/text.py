"""Figures as people read and write them: durations, sizes, tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlmcompress.errors import UserError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1}


def parse_size(text: str | int) -> int:
    """Bytes of `5GB`, `200MB`, `1GiB` or a plain number."""
    text = str(text).strip().upper().replace(" ", "")
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        size = int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UserError(f"shard_size '{text}' is not a size; write it like 5GB or 500MB")
    return size


def check_size(text: str) -> str:
    """A size with its unit, as it is written, or ValueError."""
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*[KMG]i?B\s*", text, re.IGNORECASE) or not float(re.sub(r"[^\d.]", "", text)):
        raise ValueError("Input should be a size like 5GB or 500MB")
    return text


def duration(seconds: float) -> str:
    """`8 s`, `3:05 min`, `2:10 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} min"
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"


def size(count: float) -> str:
    """Bytes with a unit of a thousand: `7.59 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def table(rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Columns aligned, the last one ragged."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))] if texts else []
    return "\n".join(
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in texts
    )

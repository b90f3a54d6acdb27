"""Sizes, durations and tables in words."""

from __future__ import annotations

from collections.abc import Sequence


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

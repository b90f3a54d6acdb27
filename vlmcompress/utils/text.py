"""Format sizes, ratios, durations and tables, and parse sizes, for all verbs and reports.

The size of a model's weights is that of its tensors, without file headers, so that `quantize`, `doctor`, `eval`, `bench`,
reports and model cards show the same figures for the same checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from vlmcompress.utils.errors import UserError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1}


def figures(value: float) -> str:
    """Format a number to three significant figures, rounded to an integer from 1,000 on: `0.0123`, `12.0`, `1,234`; tiny
    numbers as `1.2e-5`."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    exponent = math.floor(math.log10(float(f"{abs(value):.2e}")) + 1e-12)  # of the rounded value: 9.999 is 10.0
    if exponent < -3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:,.{max(0, 2 - exponent)}f}"


def percentage(share: float) -> str:
    """Format a non-negative share as a percentage with three figures, without an exponent: `12.3%`, `0.00134%`, `0.000820%`;
    below a millionth it is `<0.0001%`."""
    value = float(f"{100 * share:.2e}")
    if 0 < value < 0.001:
        return "<0.0001%" if value < 0.0001 else f"{value:.6f}%"
    return f"{figures(value)}%"


def size(count: float) -> str:
    """Write a number of bytes in decimal units with three figures: `512 B`, `7.12 MB`, `61.0 GB`."""
    units = iter(("kB", "MB", "GB", "TB"))
    unit = "B"
    while count >= 999.5 and unit != "TB":
        count, unit = count / 1000, next(units)
    return f"{figures(count) if unit != 'B' else int(count)} {unit}"


def times(ratio: float) -> str:
    """Format a ratio: `1.42x`; below 0.1 and from 100 on with three significant figures: `0.00441x`, `227x`."""
    return f"{ratio:.2f}x" if 0.1 <= ratio < 100 else f"{figures(ratio)}x"


def smaller(before: float, after: float) -> str:
    """Compare two sizes, both above zero: `1.96x smaller`, or `1.05x larger`."""
    return f"{times(before / after)} smaller" if after <= before else f"{times(after / before)} larger"


def points(share: float) -> str:
    """Format a difference of shares in percentage points: `-0.013` as `-1.3`; zero as `0.0`, without a sign."""
    text = f"{100 * share:+.1f}"
    return text if float(text) else text[1:]


def duration(seconds: float) -> str:
    """Write a duration: `8 s`, `3:05 min`, `2:10 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} min"
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"


def table(rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Format rows as lines of aligned columns, without padding in the last one."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))] if texts else []
    return "\n".join(
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in texts
    )


def parse_pixels(text: str, flag: str, least: int = 1, most: int = 2**31) -> tuple[int, int]:
    """The width and height of an image, from `1024x768`, or `448` for a square.

    Raises:
        UserError: not a size, or a side has fewer than `least` or more than `most` pixels.
    """
    match = re.fullmatch(r"(\d{1,10})(?:[x×*](\d{1,10}))?", text.strip().lower(), re.ASCII)
    width, height = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not least <= min(width, height) <= max(width, height) <= most:
        limits = f", each from {least} to {most}" if least > 1 else ""
        raise UserError(f"{flag} {text[:40]} is not a size; write it WIDTHxHEIGHT, like 1024x768{limits}")
    return width, height


def parse_bytes(text: str | int, what: str) -> int:
    """The number of bytes in `5GB`, `200MB`, `1GiB` or a plain number.

    Args:
        what: name of the setting in the error, like `--max-size`.

    Raises:
        UserError: not a size, or not above zero.
    """
    written = str(text).strip().upper().replace(" ", "")
    unit = next((unit for unit in _UNITS if written.endswith(unit)), "")
    try:
        # `float` alone takes digits of every script
        count = int(float(written.removesuffix(unit)) * _UNITS.get(unit, 1)) if written.isascii() else 0
    except (ValueError, OverflowError):
        count = 0
    if count <= 0:
        raise UserError(f"{what} '{text}' is not a size; write it like 5GB or 500MB")
    return count


def require_size(text: str) -> str:
    """Return a size like `5GB` unchanged, or raise ValueError if it is not one."""
    match = re.fullmatch(r"\s*(\d+(\.\d+)?)\s*[KMG]i?B\s*", text, re.IGNORECASE | re.ASCII)
    if not match or not float(match[1]):
        raise ValueError("Input should be a size like 5GB or 500MB")
    return text

"""Sizes, ratios and durations as text, and sizes read from text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vlmcompress.utils import text
from vlmcompress.utils.errors import UserError

WRITTEN: list[tuple[Callable, dict]] = [
    (text.figures, {0: "0", 0.0123: "0.0123", 9.999: "10.0", 12: "12.0", 1234.5: "1,234", 1.23e-5: "1.2e-5"}),
    (
        text.percentage,
        {0: "0%", 1: "100%", 0.1234: "12.3%", 0.00034: "0.0340%", 9.999e-6: "0.00100%", 9.9e-7: "<0.0001%"},
    ),
    (text.times, {0.00441: "0.00441x", 0.1: "0.10x", 1.416: "1.42x", 226.62: "227x"}),
    (text.size, {0: "0 B", 999: "999 B", 1000: "1.00 kB", 999_600_000: "1.00 GB", 61e9: "61.0 GB", 5e15: "5,000 TB"}),
    (text.points, {-0.013: "-1.3", 0.013: "+1.3", -0.0001: "0.0"}),
    (text.duration, {8.2: "8 s", 185: "3:05 min", 7800: "2:10 h"}),
]


@pytest.mark.parametrize(("write", "expected"), WRITTEN, ids=lambda value: getattr(value, "__name__", ""))
def test_numbers_as_text(write: Callable, expected: dict) -> None:
    assert {value: write(value) for value in expected} == expected


def test_reductions_of_size_in_words() -> None:
    assert text.smaller(7_119_872, 3_627_456) == "1.96x smaller" and text.smaller(100, 105) == "1.05x larger"


def test_columns_of_a_table_are_aligned() -> None:
    assert text.table([("a", 1, "x"), ("long", 22, "")]) == "  a     1   x\n  long  22"


@pytest.mark.parametrize(
    ("written", "count"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("1GiB", 2**30), (77, 77), ("9B", 9)]
)
def test_sizes_are_read_from_text(written: str | int, count: int) -> None:
    assert text.parse_bytes(written, "shard_size") == count


@pytest.mark.parametrize("written", ["", "GB", "-1GB", "0", "inf", "1e400GB", "nan"])
def test_sizes_that_are_refused(written: str) -> None:
    with pytest.raises(UserError) as caught:
        text.parse_bytes(written, "--max-size")
    assert str(caught.value) == f"--max-size '{written}' is not a size; write it like 5GB or 500MB"

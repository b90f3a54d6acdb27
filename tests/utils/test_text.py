"""Sizes, ratios and durations as text, letter by letter, and sizes read from text."""

from __future__ import annotations

import pytest

from vlmcompress.utils import text
from vlmcompress.utils.errors import UserError


def test_figures_have_three_digits() -> None:
    values = [0, 0.0123, 0.1, 1, 9.999, 12, 435.4, 999.6, 1234.5, 1.23e-5, 1e-3]
    expected = ["0", "0.0123", "0.100", "1.00", "10.0", "12.0", "435", "1,000", "1,234", "1.2e-5", "0.00100"]
    assert [text.figures(value) for value in values] == expected


def test_small_percentages_have_one_form() -> None:
    """Decimals, whatever the size: readers compare rows of a column."""
    shares = [0, 1, 0.5, 0.1234, 0.00034, 1.34e-5, 9.999e-6, 8.2e-6, 1.5e-6, 9.9e-7, 1e-12]
    expected = ["0%", "100%", "50.0%", "12.3%", "0.0340%", "0.00134%", "0.00100%", "0.000820%", "0.000150%"]
    assert [text.percentage(share) for share in shares] == [*expected, "<0.0001%", "<0.0001%"]


def test_ratios_far_from_one_keep_three_figures() -> None:
    values = [0.00441, 0.0664, 0.1, 1.416, 15.05, 226.62]
    assert [text.times(value) for value in values] == ["0.00441x", "0.0664x", "0.10x", "1.42x", "15.05x", "227x"]


def test_sizes_in_words() -> None:
    values = [0, 12, 999, 1000, 7_119_872, 999_600_000, 61e9, 1.5e12, 5e15]
    expected = ["0 B", "12 B", "999 B", "1.00 kB", "7.12 MB", "1.00 GB", "61.0 GB", "1.50 TB", "5,000 TB"]
    assert [text.size(value) for value in values] == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(7_119_872, 3_627_456, "1.96x smaller"), (100, 100, "1.00x smaller"), (100, 105, "1.05x larger")],
)
def test_reductions_of_size_in_words(before: int, after: int, expected: str) -> None:
    assert text.smaller(before, after) == expected


def test_points_have_no_negative_zero() -> None:
    assert [text.points(x) for x in (-0.013, 0.013, -0.0001, 0.0)] == ["-1.3", "+1.3", "0.0", "0.0"]


@pytest.mark.parametrize(("seconds", "expected"), [(8.2, "8 s"), (185, "3:05 min"), (7800, "2:10 h")])
def test_duration(seconds: float, expected: str) -> None:
    assert text.duration(seconds) == expected


def test_table() -> None:
    assert text.table([("a", 1, "x"), ("long", 22, "")]) == "  a     1   x\n  long  22"


@pytest.mark.parametrize(
    ("written", "count"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("1GiB", 2**30), (77, 77), ("9B", 9)]
)
def test_parse_bytes(written: str | int, count: int) -> None:
    assert text.parse_bytes(written, "shard_size") == count


@pytest.mark.parametrize("written", ["", "GB", "-1GB", "0", "inf", "1e400GB", "nan"])
def test_sizes_that_are_refused(written: str) -> None:
    with pytest.raises(UserError) as caught:
        text.parse_bytes(written, "--max-size")
    assert str(caught.value) == f"--max-size '{written}' is not a size; write it like 5GB or 500MB"

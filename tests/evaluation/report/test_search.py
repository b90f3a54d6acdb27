"""The report of a search claims no more of its winner than was shown."""

from __future__ import annotations

from typing import Any

import pytest

from vlmcompress.evaluation.report import search


@pytest.mark.parametrize(
    ("confirmed", "tail"),
    [
        ("pass", "(measured), for a loss of at most 10 points."),
        ("inconclusive", "(measured); can't tell if the loss is at most 10 points."),
        ("fail", "(measured), but it loses more than 10 points."),
        (None, "(measured); not confirmed: a loss of at most 10 points has a chance of 87%."),
    ],
)
def test_headline(confirmed: str | None, tail: str) -> None:
    row = {"name": "int8", "gain": 1.5, "winner": True, "rough": False, "chance": 0.87}
    data: dict[str, Any] = {"winner": {"name": "int8"}, "candidates": [row], "max_drop": 0.1, "optimize": "throughput"}
    data |= {"gains": "measured"} | ({"confirmed": {"verdict": confirmed}} if confirmed else {})
    assert search.headline(data) == f"int8: 1.50x the requests a second {tail}"

"""What the task files under `eval/tasks` say in Python: prompts and scores of single rows.

A scoring function takes a row and the list of answers (one) and gives values in 0 to 1: first the task's metric, then
`parsed`, 0 where no answer was found in the text. Such an answer counts as wrong. The rules are in `scoring`.
"""

from __future__ import annotations

from typing import Any

from vlmcompress.calibration.rows import MARK
from vlmcompress.evaluation import local_data, scoring

Row = dict[str, Any]
Scores = dict[str, float]


def world_text(row: Row) -> str:
    return MARK * len(local_data.images(row)) + row["question"]


def exact(row: Row, answers: list[str]) -> Scores:
    """Exact match; the whole text is the answer, so nothing can fail to parse."""
    return {"exact_match": float(scoring.normalise(answers[0]) == scoring.normalise(row["answer"]))}

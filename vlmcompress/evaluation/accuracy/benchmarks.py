"""Functions for the task files in `eval/tasks`: prompts and scores of single rows.

A scoring function takes a row and the list of answers (one) and returns values in 0 to 1: first the task's metric, then
`parsed`, which is 0 if no answer was found in the text. Such an answer counts as wrong. The rules are in `scoring`.
"""

from __future__ import annotations

import ast
import re
import string
from typing import Any

from vlmcompress.evaluation.accuracy import grounding, local_data, scoring
from vlmcompress.models.data.layouts import LETTER
from vlmcompress.models.data.samples import MARK, LazyImages

Row = dict[str, Any]
Scores = dict[str, float]


def world_text(row: Row) -> str:
    return MARK * len(local_data.images(row)) + row["question"]


def exact(row: Row, answers: list[str]) -> Scores:
    """Score by exact match; the whole text is the answer, so that parsing cannot fail."""
    return {"exact_match": float(scoring.normalise(answers[0]) == scoring.normalise(row["answer"]))}


def chartqa(row: Row, answers: list[str]) -> Scores:
    return score("relaxed_accuracy", answers[0], any(scoring.relaxed(answers[0], label) for label in row["label"]))


def docvqa(row: Row, answers: list[str]) -> Scores:
    return score("anls", answers[0], scoring.anls(answers[0], row["answers"]))


def textvqa(row: Row, answers: list[str]) -> Scores:
    return score("vqa_accuracy", answers[0], scoring.vqa_accuracy(answers[0], row["answers"]))


def vqav2(row: Row, answers: list[str]) -> Scores:
    # Ten people answered each question; TextVQA's table has their answers alone, VQAv2's a mapping for each.
    people = [person["answer"] for person in row["answers"]]
    return score("vqa_accuracy", answers[0], scoring.vqa_accuracy(answers[0], people, cut=False))


def ocrbench(row: Row, answers: list[str]) -> Scores:
    # HME100k is OCRBench's part of handwritten formulas, in which spaces do not count.
    formulas, expected = row["dataset"] == "HME100k", row["answer"]
    texts = [expected] if isinstance(expected, str) else expected
    return score("accuracy", answers[0], scoring.contains(answers[0], texts, formulas=formulas))


def score(metric: str, answer: str, value: float | None) -> Scores:
    """The score under the metric's name, and whether an answer was found: `value` is not None and the text is not empty."""
    return {metric: float(value or 0.0), "parsed": float(value is not None and bool(answer.strip()))}


def mmmu_text(row: Row) -> str:
    """The prompt of MMMU's `llava1.5.yaml`, with `<image>` for `<image 1>` and so on."""
    return re.sub("<image [1-7]>", MARK, _mmmu_prompt(row))


def mmmu_images(row: Row) -> LazyImages:
    """The images in the order of the prompt, where an image may occur twice."""
    names = re.findall("<image ([1-7])>", _mmmu_prompt(row))
    return LazyImages([local_data.image_source(row[f"image_{name}"]) for name in names], f"sample '{row['id']}'")


def _mmmu_prompt(row: Row) -> str:
    if row["question_type"] != "multiple-choice":
        return f"{row['question']}\n\nAnswer the question using a single word or phrase."
    options = "\n".join(f"({letter}) {option}" for letter, option in _mmmu_options(row).items())
    return f"{row['question']}\n\n{options}\n\n{LETTER}"


def _mmmu_options(row: Row) -> dict[str, str]:
    # The table holds a Python list as text.
    return dict(zip(string.ascii_uppercase, ast.literal_eval(row["options"]), strict=False))


def mmmu_target(row: Row) -> list[str]:
    """The expected answers; open questions may have several, as a list in text form."""
    text = row["answer"]
    return [str(value) for value in ast.literal_eval(text)] if text.startswith("[") else [text]


def mmmu(row: Row, answers: list[str]) -> Scores:
    if row["question_type"] != "multiple-choice":
        return score("accuracy", answers[0], scoring.mmmu_open(answers[0], mmmu_target(row)))
    # None where the answer names no option: MMMU's own script then draws one at random; here it is wrong, and not parsed.
    chosen = scoring.mmmu_choice(answers[0], _mmmu_options(row))
    return score("accuracy", answers[0], None if chosen is None else chosen in mmmu_target(row))


def mmbench_text(row: Row) -> str:
    hint = row.get("hint")
    options = "\n".join(f"{letter}. {option}" for letter, option in _mmbench_options(row).items())
    lines = [*([str(hint)] if _filled(hint) else []), row["question"], options, LETTER]
    return MARK + "\n".join(lines)


def _mmbench_options(row: Row) -> dict[str, str]:
    return {letter: str(row[letter]) for letter in "ABCD" if _filled(row[letter])}


def _filled(value: Any) -> bool:
    """Whether a cell of MMBench's tables has content; empty ones hold `nan`."""
    return value is not None and str(value) not in ("", "nan")


def mmbench(row: Row, answers: list[str]) -> Scores:
    chosen = scoring.mmbench_choice(answers[0], _mmbench_options(row))
    return score("accuracy", answers[0], None if chosen is None else chosen == row["answer"])


def pope(row: Row, answers: list[str]) -> dict[str, Any]:
    """Score a POPE answer: accuracy, and (expected, said) for the F1 score of yes."""
    said = scoring.yes_or_no(answers[0])
    scores = score("accuracy", answers[0], None if said is None else said == row["answer"])
    return {**scores, "f1": (row["answer"], said)}


def pope_f1(pairs: list[tuple[str, str | None]]) -> float:
    """F1 of the answer `yes` over pairs (expected, said)."""
    hits = sum(pair == ("yes", "yes") for pair in pairs)
    # 2 TP / (2 TP + FP + FN): every yes that was expected, and every one that was said, of each hit both.
    named = sum((expected == "yes") + (said == "yes") for expected, said in pairs)
    return 2 * hits / named if named else 0.0


def refcoco_rows(dataset: Any) -> Any:
    """One row for each expression that describes a region, with an `id` and the text as `expression`."""
    # A row of the data is a region with several expressions, each of which is a question.
    expressions = [
        (row, number, text)
        for row, texts in enumerate(dataset["answer"])
        for number, text in enumerate([texts] if isinstance(texts, str) else texts)
    ]
    rows = dataset.select([row for row, *_ in expressions])
    if "id" in rows.column_names:
        rows = rows.remove_columns(["id"])
    return rows.add_column("id", [f"{row}-{number}" for row, number, _ in expressions]).add_column(
        "expression", [text for *_, text in expressions]
    )


def refcoco_target(row: Row) -> str:
    """The region as [left, top, right, bottom], as shares of the image's width and height."""
    across, down = local_data.images(row)[0].size
    return _box(row, across, down)


def refcoco_target_pixels(row: Row) -> str:
    """The region as [left, top, right, bottom] in pixels of the image."""
    return _box(row, 1, 1)


def _box(row: Row, across: int, down: int) -> str:
    left, top, width, height = row["bbox"]  # in pixels
    box = left / across, top / down, (left + width) / across, (top + height) / down
    return f"[{', '.join(f'{value:.4f}' for value in box)}]"


def refcoco(row: Row, answers: list[str]) -> Scores:
    """Score 1 if the box, in shares or thousandths of width and height, overlaps the region by an IoU of at least 0.5."""
    return _box_scores("iou_0.5", answers[0], refcoco_target(row))


def refcoco_pixels(row: Row, answers: list[str]) -> Scores:
    """Score as `refcoco` does, for models that give boxes in pixels."""
    return _box_scores("iou_0.5", answers[0], refcoco_target_pixels(row))


def boxes(row: Row, answers: list[str]) -> Scores:
    """Score 1 for a box whose IoU with the answer's is at least 0.5, or a point in it; `iou` is 0 for points."""
    return _box_scores("box_match", answers[0], row["answer"])


def _box_scores(metric: str, answer: str, expected: str) -> Scores:
    scores = score(metric, answer, grounding.correct(answer, expected))
    return scores | {"iou": grounding.overlap(answer, expected) or 0.0}

"""Functions for the task files of MathVista, MMMU-Pro, Video-MME, MMLU-Pro and GPQA, like those in `benchmarks`."""

from __future__ import annotations

import ast
import hashlib
import re
import string
from typing import Any

from vlmcompress.evaluation.accuracy import local_data, scoring
from vlmcompress.evaluation.accuracy.benchmarks import Row, Scores, score
from vlmcompress.models.data.samples import MARK, LazyImages

DIRECT = "Answer with the option letter from the given choices directly."
WATCH = (
    "Select the best answer to the following multiple-choice question based on the video. "
    "Respond with only the letter (A, B, C, or D) of the correct option."
)
STEPS = 'Think step by step and then finish your answer with "the answer is (X)" where X is the correct letter choice.'


def mathvista_image(row: Row) -> LazyImages:
    """The image, which the data set has besides its path."""
    return LazyImages([local_data.image_source(row["decoded_image"])], f"sample '{row['pid']}'")


def mathvista_text(row: Row) -> str:
    """The benchmark's own query: a hint at the form of the answer, the question, and the choices."""
    return f"{MARK}{row['query']}"


def mathvista(row: Row, answers: list[str]) -> Scores:
    precision = None if row["precision"] is None else int(row["precision"])
    kind = row["answer_type"] if row["question_type"] != "multi_choice" else "choice"
    value = scoring.mathvista_value(answers[0], kind, row["choices"] or (), precision)
    return score("accuracy", answers[0], None if value is None else value == row["answer"])


def mmmu_pro_text(row: Row) -> str:
    """The prompt of MMMU-Pro's `prompts.yaml`, direct, with `<image>` for `<image 1>` and so on."""
    return re.sub("<image [1-7]>", MARK, _mmmu_pro_prompt(row))


def mmmu_pro_images(row: Row) -> LazyImages:
    """The images in the order of the prompt, where an image may occur twice."""
    names = re.findall("<image ([1-7])>", _mmmu_pro_prompt(row))
    return LazyImages([local_data.image_source(row[f"image_{name}"]) for name in names], f"sample '{row['id']}'")


def _mmmu_pro_prompt(row: Row) -> str:
    return "\n".join([row["question"], _listed(_mmmu_pro_options(row)), DIRECT])


def mmmu_pro_vision_text(row: Row) -> str:
    """The prompt where question and choices are in the image."""
    return MARK + DIRECT


def _mmmu_pro_options(row: Row) -> dict[str, str]:
    return _lettered(ast.literal_eval(row["options"]))


def mmmu_pro(row: Row, answers: list[str]) -> Scores:
    chosen = scoring.mmmu_pro_choice(answers[0], _mmmu_pro_options(row))
    return score("accuracy", answers[0], None if chosen is None else chosen == row["answer"])


def video_mme_text(row: Row) -> str:
    """The benchmark's own prompt without subtitles; the options include their letters."""
    return "\n".join([WATCH, row["question"], *row["options"], "The best answer is:"])


def video_mme(row: Row, answers: list[str]) -> Scores:
    chosen = scoring.video_mme_choice(answers[0])
    return score("accuracy", answers[0], None if chosen is None else chosen == row["answer"])


def mmlu_pro_text(row: Row) -> str:
    """Question, choices, and the benchmark's instruction for a chain of thought; no examples."""
    return f"{row['question']}\n{_listed(_lettered(row['options']))}\n{STEPS}"


def mmlu_pro(row: Row, answers: list[str]) -> Scores:
    chosen = scoring.final_letter(answers[0], len(row["options"]))
    return score("exact_match", answers[0], None if chosen is None else chosen == row["answer"])


def gpqa_text(row: Row) -> str:
    """Question, choices in the order of `_gpqa_options`, and the instruction for a chain of thought."""
    return f"{row['Question'].strip()}\n{_listed(_gpqa_options(row))}\n{STEPS}"


def gpqa_target(row: Row) -> str:
    """The letter of the right choice."""
    right = _gpqa_strip(row["Correct Answer"])
    return next(letter for letter, option in _gpqa_options(row).items() if option == right)


def gpqa(row: Row, answers: list[str]) -> Scores:
    chosen = scoring.final_letter(answers[0], 4)
    return score("exact_match", answers[0], None if chosen is None else chosen == gpqa_target(row))


def _gpqa_options(row: Row) -> dict[str, str]:
    """The choices in a fixed random order per row, as the data have the right one first."""
    keys = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    drawn = sorted(keys, key=lambda key: hashlib.sha256(f"{row['Record ID']} {key}".encode()).digest())
    return _lettered([_gpqa_strip(row[key]) for key in drawn])


def _gpqa_strip(text: str) -> str:
    """A choice without the data set's markup, as in lm-eval's task."""
    return text.strip().replace(" [title]", ". ").replace("  ", " ")


def _lettered(options: Any) -> dict[str, str]:
    return dict(zip(string.ascii_uppercase, map(str, options), strict=False))


def _listed(options: dict[str, str]) -> str:
    return "\n".join(f"{letter}. {option}" for letter, option in options.items())

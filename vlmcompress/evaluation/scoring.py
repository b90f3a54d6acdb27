"""Rules that score answers, each as its source states it. Scores are in 0 to 1; None: no answer in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")


def normalise(text: str) -> str:
    """Normalize a text for comparison: case-folded, spaces collapsed, one final full stop dropped."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


def relaxed(answer: str, expected: str, tolerance: float = 0.05) -> bool:
    """ChartQA's relaxed accuracy: numbers within 5% of the expected one, other answers equal but for case.

    Masry et al. 2022, section 5.1 (arXiv 2203.10244), after Methani et al. 2020; in detail as in pix2struct's
    `metrics.relaxed_correctness`: percentages count as fractions, and an expected 0 is compared as text.
    """
    answer, expected = answer.strip(), expected.strip()
    number, target = _fraction(answer), _fraction(expected)
    if number is not None and target:
        return abs(number - target) <= tolerance * abs(target)
    return answer.lower() == expected.lower()


def _fraction(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(answer: str, expected: Sequence[str], threshold: float = 0.5) -> float:
    """Average normalised Levenshtein similarity, of one answer.

    1 - distance / length of the longer text, for the most similar expected answer; 0 if that is below the threshold.
    Case and runs of spaces don't matter. Biten et al. 2019 (ST-VQA, arXiv 1905.13648, equation 1) and the evaluation
    script of DocVQA's challenge (rrc.cvc.uab.es, challenge 17).
    """
    text = " ".join(answer.lower().split())
    best = 0.0
    for other in expected:
        other = " ".join(other.lower().split())
        longest = max(len(text), len(other))
        best = max(best, 1 - levenshtein(text, other) / longest if longest else 1.0)
    return best if best >= threshold else 0.0


def levenshtein(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions of characters that make `b` from `a`."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]


def yes_or_no(answer: str) -> str | None:
    """Read yes or no: `no` if the first sentence has the word no or not, else `yes` if it has yes.

    POPE's `evaluate.py` (Li et al. 2023, arXiv 2305.10355) takes everything without no or not for a yes; a text that has
    neither word counts here as no answer.
    """
    words = set(re.findall(r"[a-z]+", answer.partition(".")[0].lower()))
    return "no" if words & {"no", "not"} else "yes" if "yes" in words else None


def final_number(answer: str) -> float | None:
    """The number after the last `####`, else the last number in the text.

    GSM8K (Cobbe et al. 2021, arXiv 2110.14168) marks answers by `####`; for models that don't, the last number is what
    lm-eval's `flexible-extract` takes.
    """
    marked = answer.rpartition("####")[2]
    found = _NUMBER.findall(marked)
    if not found:
        return None
    return float((found[0] if "####" in answer else found[-1]).replace(",", ""))


def box(answer: str, scale: float = 1.0) -> tuple[float, float, float, float] | None:
    """Read a box: the last four numbers in a row of the text as (left, top, right, bottom), divided by `scale`."""
    number, between = r"-?(?:\d+\.?\d*|\.\d+)", r"[\s,;()\[\]<>]+"
    found = re.findall(rf"(?<![\w.])({number}){between}({number}){between}({number}){between}({number})", answer)
    if not found:
        return None
    left, top, right, bottom = (float(value) / scale for value in found[-1])
    return left, top, right, bottom


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes (left, top, right, bottom); a box that is inside out has no area."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = sum(max(right - left, 0) * max(bottom - top, 0) for left, top, right, bottom in (a, b))
    return width * height / (areas - width * height)

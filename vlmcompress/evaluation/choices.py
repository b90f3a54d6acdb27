"""Find the chosen option, or an open answer, in a model's text. None: there is none; nothing is drawn at random."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_KEYS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    r"-?\b\d{1,3}(?:,\d{3})+\b",  # with commas
    r"-?\d+(?:\.\d+)?[eE][+-]?\d+",  # scientific
    r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
)


def mmmu_choice(answer: str, options: Mapping[str, str]) -> str | None:
    """Find the letter that stands last in the text as `(A)`, else as a word; else, in a text of over five words, the option
    whose content stands last.

    It follows MMMU's `parse_multi_choice_response` (Yue et al. 2023, arXiv 2311.16502; MMMU-Benchmark/MMMU,
    `eval_utils.py`), which chooses at random where this gives None.
    """
    text = answer
    for mark in ",.!?;:'":
        text = text.strip(mark)
    text = f" {text} "
    long = len(text.split()) > 5
    forms = [{letter: f"({letter})" for letter in options}, {letter: f" {letter} " for letter in options}]
    for form in forms:
        if places := {letter: text.rfind(shown) for letter, shown in form.items() if shown in text}:
            return max(places, key=lambda letter: places[letter])
    lower = text.lower()
    places = {letter: lower.rfind(option.lower()) for letter, option in options.items() if option.lower() in lower}
    return max(places, key=lambda letter: places[letter]) if long and places else None


def mmmu_open(answer: str, expected: Sequence[str]) -> bool:
    """Whether an expected text stands in a key part of the answer, or an expected number (to two decimals) is among them.

    It follows `parse_open_response` and `eval_open` of MMMU's `eval_utils.py`.
    """
    parts = _key_parts(answer)
    numbers = [found for part in parts for pattern in _NUMBERS for found in re.findall(pattern, part)]
    given = {value for text in (*parts, *numbers) for value in _values(text)}
    wanted = [value for text in expected for value in _values(text)]
    texts = [value for value in given if isinstance(value, str)]
    return any(value in given or any(isinstance(value, str) and value in text for text in texts) for value in wanted)


def _key_parts(answer: str) -> list[str]:
    """Extract from each line the shortest text that follows a word like "is"; without any such word the whole answer."""
    lines = answer.strip().strip(".").lower().split("\n")
    parts = []
    for number, line in enumerate(lines, 1):
        keys = (*_KEYS, "=") if number == len(lines) else _KEYS
        shortest = ""
        for key in keys:
            tail = line.split(key)[-1].strip()
            if key in line and (not shortest or len(tail) < len(shortest)):
                shortest = tail
        if shortest and shortest not in tuple(":,.!?;'"):
            parts.append(shortest)
    return parts or ["\n".join(lines)]


def _values(text: str) -> list[str | float]:
    """Normalize a text as a rounded number, or as lower case with a space before or behind a single letter."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]


def mmbench_choice(answer: str, options: Mapping[str, str]) -> str | None:
    """Find the only option letter among the words; else the only option whose text stands in the answer.

    This is the matching that MMBench (Liu et al. 2023, arXiv 2307.06281) does before it asks a language model, as in
    VLMEvalKit's `can_infer`: in a text of over three words an "A" may be the article and makes letters uncertain.
    """
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
    letters = [letter for letter in options if letter in words]
    if len(letters) == 1 and not ("A" in words and len(words) > 3):
        return letters[0]
    named = [letter for letter, option in options.items() if option.lower() in answer.lower()]
    return named[0] if len(named) == 1 else None

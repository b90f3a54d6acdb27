"""Scoring rules against worked examples of their sources, and against other implementations."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.tasks.mmmu import utils as official

from vlmcompress.evaluation.accuracy import scoring


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("10.5", "10", True),  # within 5% of the gold answer (arXiv 2203.10244, section 5.1)
        ("10.51", "10", False),
        ("9.5", "10", True),
        ("-10.4", "-10", True),
        ("5%", "0.05", True),
        ("5", "5%", False),
        ("Yes ", "yes", True),
        ("Germany", "Germany.", False),
        ("0.0", "0", False),
        ("0", "0", True),
        ("2,000", "2000", False),
        ("", "3", False),
    ],
)
def test_relaxed_accuracy(answer: str, expected: str, right: bool) -> None:
    assert scoring.relaxed(answer, expected) is right


@cache
def edits(a: str, b: str) -> int:
    """Levenshtein's distance by its recursive definition."""
    if not a or not b:
        return len(a) + len(b)
    return min(edits(a[1:], b) + 1, edits(a, b[1:]) + 1, edits(a[1:], b[1:]) + (a[0] != b[0]))


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_levenshtein(a: str, b: str) -> None:
    assert scoring.levenshtein(a, b) == edits(a, b)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("Saint  Louis", ["saint louis"], 1.0),
        ("kitten", ["sitting"], 1 - 3 / 7),
        ("ab", ["ax", "abc"], 1 - 1 / 3),
        ("abcd", ["axyd"], 0.5),
        ("abc", ["axy"], 0.0),  # a third is alike: below the threshold
        ("", ["abc"], 0.0),
    ],
)
def test_anls(answer: str, expected: list[str], score: float) -> None:
    assert scoring.anls(answer, expected) == pytest.approx(score)


@pytest.mark.parametrize(("agree", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_accuracy_by_people_who_agree(agree: int, score: float) -> None:
    """The well-known values for ten people: 30, 60, 90, 100%."""
    assert scoring.vqa_accuracy("red", ["red"] * agree + ["blue"] * (10 - agree)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "as_compared"),
    [
        ("The Two dogs.", "2 dogs"),
        ("dont", "don't"),
        ("couldnt've", "couldn't've"),
        ("couldn'tve", "couldn't've"),
        ("its", "its"),
        ("wed", "wed"),
        ("5.5", "5.5"),
        ("a.m.", "am"),
        ("1,000", "1000"),
        ("black-and-white", "black and white"),
        ("red; blue", "red blue"),
        ("what?", "what"),
        ("dog's", "dog 's"),
        ("None", "0"),
        ("line\nbreak", "line break"),
    ],
)
def test_vqa_text_processing(text: str, as_compared: str) -> None:
    assert scoring.vqa_normalise(text) == as_compared


@pytest.mark.parametrize(
    ("text", "as_compared"),
    [
        ("red,white", "red white"),
        ("red, white", "red white"),
        ("1,000-2,000 m", "10002000 m"),
        ("What?", "what"),
        ("yes/no", "yes no"),
        ("the dog's", "dog's"),
        ("Two t-shirts.", "2 t shirts"),
        ("dont", "don't"),
        ("3.5", "3.5"),
    ],
)
def test_vqa_text_processing_of_vqav2(text: str, as_compared: str) -> None:
    """By the rules of `vqaEval.py`, worked out by hand: commas are marks like others."""
    assert scoring.vqa_normalise(text, cut=False) == as_compared


OPTIONS = {"A": "red car", "B": "4.5", "C": "the moon", "D": "7"}
WORDS = st.sampled_from(
    [
        "A",
        "B",
        "(C)",
        "(A)",
        "D.",
        "the",
        "answer",
        "is",
        "moon",
        "red",
        "car",
        "7",
        "4.5",
        "so",
        "=",
        "a",
        "\n",
        ".",
        "x",
    ]
)


@settings(max_examples=120)
@given(st.lists(WORDS, max_size=12).map(" ".join))
def test_mmmu_choice_is_the_official_one_or_none(answer: str) -> None:
    """Where the official parser draws an option at random, the package's gives none."""
    drawn: list = []
    official.random.choice, original = lambda options: drawn.append(options) or "random", official.random.choice
    try:
        theirs = official.parse_multi_choice_response(answer, list(OPTIONS), OPTIONS)
    finally:
        official.random.choice = original
    assert scoring.mmmu_choice(answer, OPTIONS) == (None if drawn else theirs)


@settings(max_examples=120)
@given(
    st.lists(st.one_of(WORDS, st.from_regex(r"-?\d{1,4}(,\d{3})?(\.\d{1,3})?", fullmatch=True)), max_size=10).map(
        " ".join
    ),
    st.sampled_from([["7"], ["4.5", "moon"], ["red car"], ["1,234"], ["x"], ["0.33"]]),
)
def test_mmmu_open_is_the_official_rule(answer: str, expected: list[str]) -> None:
    theirs = official.eval_open(expected, official.parse_open_response(answer))
    assert scoring.mmmu_open(answer, expected) == theirs


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("B", "B"),
        ("(c).", None),
        ("(C).", "C"),
        ("The answer is C.", "C"),
        ("C. the moon, because it is round and white and far away", "C"),
        ("A or B", None),
        ("it is the moon", "C"),
        ("A nice big dog", None),
        ("A nice red car", "A"),
        ("C, A or the moon", "C"),
        ("C, not the red car", "C"),
        ("I don't know", None),
        ("", None),
    ],
)
def test_mmbench_choice(answer: str, chosen: str | None) -> None:
    assert scoring.mmbench_choice(answer, OPTIONS) == chosen


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Yes", "yes"),
        ("no, there is one dog", "no"),
        ("There is not a dog in it.", "no"),
        ("Yes. There is no cat.", "yes"),
        ("A dog", None),
        ("Nothing", None),
        ("", None),
    ],
)
def test_yes_or_no(answer: str, expected: str | None) -> None:
    assert scoring.yes_or_no(answer) == expected


@pytest.mark.parametrize("text", ["Red Star", " red   star.", "RED\nSTAR", "red star .", "red star"])
def test_normalise(text: str) -> None:
    assert scoring.normalise(text) == "red star"

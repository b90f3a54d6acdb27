"""VQA accuracy: agreement of an answer with those of ten people.

Antol et al. 2015 (arXiv 1505.00468), with the text processing of the official evaluation (GT-Vision-Lab/VQA, `vqaEval.py`)
as TextVQA's evaluator has it (Singh et al. 2019, arXiv 1904.08920; pythia's `EvalAIAnswerProcessor`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's they'd
they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's where'd where's
where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll
y'all'd've you'd you'd've you'll you're you've
"""
# The official table: each contraction with one apostrophe missing, and one entry that is the other way round.
CONTRACTIONS = {
    word[: at.start()] + word[at.end() :]: word for word in _CONTRACTIONS.split() for at in re.finditer("'", word)
} | {"somebody'd": "somebodyd"}
_NUMBERS = "zero one two three four five six seven eight nine ten"
NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBERS.split())}
ARTICLES = {"a", "an", "the"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def accuracy(answer: str, people: Sequence[str]) -> float:
    """VQA accuracy: the mean, over leaving out each person, of min(1, number of others who gave this answer / 3)."""
    text, others = process(answer), [process(person) for person in people]
    same = others.count(text)
    return sum(min(1.0, (same - (other == text)) / 3) for other in others) / len(others)


def process(text: str) -> str:
    """Normalize an answer for comparison: lower case, without punctuation and articles, numbers as digits."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    text = text.replace("\n", " ").replace("\t", " ").strip()
    stripped = text
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        stripped = stripped.replace(mark, "" if beside_space else " ")
    words = [NUMBERS.get(word, word) for word in re.sub(r"\.(?!\d)", "", stripped).split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)

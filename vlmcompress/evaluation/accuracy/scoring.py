"""Scoring rules, as defined by their sources. Scores are in 0 to 1; None: no answer was found in the text.

Options of a multiple-choice question are letter -> text. A text without a choice is never assigned a random one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence


def folded(text: str) -> str:
    """The text without differences of case and of Unicode's normal forms (NFC: one code point for a letter with its accent)."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", text).casefold())


def normalise(text: str) -> str:
    """Normalize a text for comparison: `folded`, spaces collapsed, one final full stop of any script dropped."""
    return re.sub("[.\u3002\uff0e\uff61\u0964\u06d4]$", "", " ".join(folded(text).split())).rstrip()


def relaxed(answer: str, expected: str, tolerance: float = 0.05) -> bool:
    """ChartQA's relaxed accuracy: numbers within 5% of the expected one, other answers equal ignoring case.

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
    """Average normalised Levenshtein similarity (ANLS), of one answer.

    1 - distance / length of the longer text, for the most similar expected answer; 0 if that is below the threshold.
    Case and runs of spaces don't matter. Biten et al. 2019 (ST-VQA, arXiv 1905.13648, equation 1) and the evaluation
    script of DocVQA's challenge (rrc.cvc.uab.es, challenge 17).
    """
    text = " ".join(folded(answer).split())
    best = 0.0
    for other in expected:
        other = " ".join(folded(other).split())
        longest = max(len(text), len(other))
        best = max(best, 1 - levenshtein(text, other) / longest if longest else 1.0)
    return best if best >= threshold else 0.0


def levenshtein(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions of characters that make `b` from `a`.

    Bit-parallel (Myers, J. ACM 46, 1999, in Hyyrö's form of 2003): a column of the table of distances is two integers, whose
    bits say where it rises and where it falls by one from a row to the next. A page of 5,000 characters takes 60 ms.
    """
    if not a:
        return len(b)
    ones, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    places: dict[str, int] = {}
    for index, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << index
    rises, falls, distance = ones, 0, len(a)
    for character in b:
        same = places.get(character, 0)
        diagonal = ((((same & rises) + rises) ^ rises) | same | falls) & ones  # no step from the cell above to the left
        right_rises, right_falls = falls | (ones & ~(diagonal | rises)), diagonal & rises
        distance += bool(right_rises & last) - bool(right_falls & last)
        right_rises = right_rises << 1 | 1
        rises = (right_falls << 1 | ~(diagonal | right_rises)) & ones
        falls = diagonal & right_rises
    return distance


def yes_or_no(answer: str) -> str | None:
    """Read yes or no: `no` if the first sentence has the word no or not, else `yes` if it has yes.

    POPE's `evaluate.py` (Li et al. 2023, arXiv 2305.10355) takes everything without no or not for a yes; a text that has
    neither word counts here as no answer.
    """
    words = set(re.findall(r"[a-z]+", answer.partition(".")[0].lower()))
    return "no" if words & {"no", "not"} else "yes" if "yes" in words else None


_MMMU_KEYS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_MMMU_NUMBERS = (
    r"-?\b\d{1,3}(?:,\d{3})+\b",  # with commas
    r"-?\d+(?:\.\d+)?[eE][+-]?\d+",  # scientific
    r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
)


def mmmu_choice(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter that stands last in the text as `(A)`, else as a word; else, in a text of over five words, the option
    whose content stands last.

    As MMMU's `parse_multi_choice_response` (Yue et al. 2023, arXiv 2311.16502; MMMU-Benchmark/MMMU,
    `eval_utils.py`), which draws an option where this returns None.
    """
    text = answer
    for mark in ",.!?;:'":
        text = text.strip(mark)
    text = f" {text} "
    long = len(text.split()) > 5
    forms = [{letter: f"({letter})" for letter in options}, {letter: f" {letter} " for letter in options}]
    for form in forms:
        if places := {letter: text.rfind(choice) for letter, choice in form.items() if choice in text}:
            return max(places, key=lambda letter: places[letter])
    lower = text.lower()
    places = {letter: lower.rfind(option.lower()) for letter, option in options.items() if option.lower() in lower}
    return max(places, key=lambda letter: places[letter]) if long and places else None


def mmmu_open(answer: str, expected: Sequence[str]) -> bool:
    """Whether an expected text occurs in a key part of the answer, or an expected number (to two decimals) is among them.

    As `parse_open_response` and `eval_open` of MMMU's `eval_utils.py`.
    """
    lines = answer.strip().strip(".").lower().split("\n")
    parts = []
    for number, line in enumerate(lines, 1):
        keys = (*_MMMU_KEYS, "=") if number == len(lines) else _MMMU_KEYS
        shortest = ""
        for key in keys:
            tail = line.split(key)[-1].strip()
            if key in line and (not shortest or len(tail) < len(shortest)):
                shortest = tail
        if shortest and shortest not in tuple(":,.!?;'"):
            parts.append(shortest)
    parts = parts or ["\n".join(lines)]
    numbers = [number for part in parts for pattern in _MMMU_NUMBERS for number in re.findall(pattern, part)]
    answers = {value for text in (*parts, *numbers) for value in _mmmu_values(text)}
    targets = [value for text in expected for value in _mmmu_values(text)]
    texts = [value for value in answers if isinstance(value, str)]
    return any(
        target in answers or any(isinstance(target, str) and target in text for text in texts) for target in targets
    )


def _mmmu_values(text: str) -> list[str | float]:
    """Normalize a text as a rounded number, or as lower case with a space before or after a single letter."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]


def mmbench_choice(answer: str, options: Mapping[str, str]) -> str | None:
    """The only option letter among the words; else the only option whose text occurs in the answer.

    This is the matching that MMBench (Liu et al. 2023, arXiv 2307.06281) does before it asks a language model, as in
    VLMEvalKit's `can_infer`: in a text of over three words an "A" may be the article and makes letters uncertain.
    """
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
    letters = [letter for letter in options if letter in words]
    if len(letters) == 1 and not ("A" in words and len(words) > 3):
        return letters[0]
    named = [letter for letter, option in options.items() if option.lower() in answer.lower()]
    return named[0] if len(named) == 1 else None


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
_DIGITS = "zero one two three four five six seven eight nine ten"
NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_DIGITS.split())}
ARTICLES = {"a", "an", "the"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def vqa_accuracy(answer: str, people: Sequence[str], cut: bool = True) -> float:
    """VQA accuracy: the mean, over leaving out each of ten people, of min(1, number of others who gave this answer / 3).

    Antol et al. 2015 (arXiv 1505.00468). `cut`: see `vqa_normalise`.
    """
    text, others = vqa_normalise(answer, cut), [vqa_normalise(person, cut) for person in people]
    same = others.count(text)
    return sum(min(1.0, (same - (other == text)) / 3) for other in others) / len(others)


def vqa_normalise(text: str, cut: bool = True) -> str:
    """Normalize an answer for comparison: lower case, without punctuation and articles, numbers as digits.

    As VQA's evaluation does (GT-Vision-Lab/VQA, `vqaEval.py`): a mark next to a space goes, in a text with a comma in a number
    every mark does, and others become spaces. `cut`: in the form of TextVQA's evaluator (Singh et al. 2019, arXiv 1904.08920;
    pythia's `EvalAIAnswerProcessor`), which takes away commas and question marks first and separates 's.
    """
    text = text.lower()
    if cut:
        text = text.replace(",", "").replace("?", "").replace("'s", " 's")
    number = re.search(r"\d,\d", text)
    text = text.replace("\n", " ").replace("\t", " ").strip()
    stripped = text
    for mark in PUNCTUATION:
        next_to_space = f"{mark} " in text or f" {mark}" in text
        stripped = stripped.replace(mark, "" if next_to_space or number else " ")
    words = [NUMBERS.get(word, word) for word in re.sub(r"\.(?!\d)", "", stripped).split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def contains(answer: str, expected: Sequence[str], formulas: bool = False) -> bool:
    """Whether an expected text occurs in the answer, in lower case; formulas are compared as written, without spaces.

    OCRBench (Liu et al. 2023, arXiv 2305.07895; Yuliang-Liu/MultimodalOCR, `example.py`), where HME100k has formulas.
    """

    def form(text: str) -> str:
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if formulas else text.lower()

    return any(form(text) in form(answer) for text in expected)

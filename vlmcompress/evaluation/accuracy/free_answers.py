"""Scores of answers to plain data (image, question, answer), which have right answers but no scoring rule.

    named = named_score("auto", [suite])           # `--score`; None for `auto`
    score = choose_score(named, suite, baseline)   # None for a suite with its own score
    after = score.applied(after)                   # both sides are scored in the same way

`exact` compares texts except for case, spaces, Unicode's normal forms and a final full stop. It rejects all answers of a model
that answers in sentences, and then no loss can be detected. So `auto` uses the baseline's first `LOOK` answers to choose the
strictest of `exact`, `normalized` and `contains` that accepts at least `SHARE` of what `contains` accepts. The candidate's
answers do not influence the choice.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress.evaluation.accuracy import grounding, scoring, transcription
from vlmcompress.evaluation.accuracy.ask import SEPARATOR, AnsweredQuestion, SuiteAnswers
from vlmcompress.evaluation.accuracy.scoring import folded
from vlmcompress.evaluation.accuracy.tasks import CUSTOM, LoadedSuite
from vlmcompress.utils.errors import UserError, did_you_mean

AUTO = "auto"
LOOK, SHARE = 64, 0.8
Rule = Callable[[str, str], float | None]
_SIGN = re.compile(
    r"(?<![\w.])[-\u2010-\u2013\u2212\ufe63\uff0d](?=[$\u20ac\xa3\xa5\u20b9]?\.?\d)[$\u20ac\xa3\xa5\u20b9]?"
)
"""The sign of a negative number, as a hyphen, dash or minus; with the currency in `-$5`."""
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uac00-\ud7a3\U00020000-\U0003ffff]"
)
"""A character of a script without spaces between words (Thai, Lao, Burmese, Khmer, Chinese, Japanese), or of Korean, which
attaches particles to words."""


def exact(answer: str, expected: str) -> float:
    """1 for the expected text, ignoring case, spaces and a final full stop; else 0."""
    return float(scoring.normalise(answer) == scoring.normalise(expected))


def normalized(answer: str, expected: str) -> float:
    """1 for the expected words (see `_words`), ignoring case, punctuation and articles; else 0."""
    return float(_words(answer) == _words(expected))


def contains(answer: str, expected: str) -> float:
    """1 if the expected words occur in the answer, contiguous and in order; else 0.

    A single letter, which may be an option or an article, must be the first or the last word. In writing systems without spaces
    between words a part of the text is enough, but for a part of a number or of a syllable. Texts of only punctuation are
    searched for literally.
    """
    if not any(character.isalnum() for character in expected):
        return float(expected.strip() in answer)
    answered, words = _words(answer), _words(expected)
    if _UNSPACED.search(expected):
        text, target = "".join(answered), "".join(words)
        begin = r"(?<![\d.-])" if target[0].isdigit() else ""
        matches = re.finditer(begin + re.escape(target) + (r"(?!\d)" if target[-1].isdigit() else ""), text)
        return float(any(not unicodedata.category(text[m.end() : m.end() + 1] or " ").startswith("M") for m in matches))
    if len(words) == 1 and len(words[0]) == 1 and words[0].isalpha():
        return float(words[0] in (answered[:1] + answered[-1:]))
    return float(any(answered[start : start + len(words)] == words for start in range(len(answered) - len(words) + 1)))


def anls(answer: str, expected: str) -> float:
    """Average normalised Levenshtein similarity: 0 to 1 by edit distance, 0 below a half (see `scoring.anls`)."""
    return scoring.anls(answer, [expected])


RULES: dict[str, tuple[Rule, str, str]] = {
    "exact": (
        exact,
        "exact_match",
        "Exact match after case folding, NFC, collapsing spaces and dropping a final full stop.",
    ),
    "normalized": (
        normalized,
        "normalized_match",
        "Match of the words, without case, punctuation and articles, small numbers as digits, with their sign.",
    ),
    "contains": (
        contains,
        "contains",
        "Right if the expected words stand in the answer, side by side and in their order.",
    ),
    "anls": (anls, "anls", "Average normalised Levenshtein similarity, 0 below a half."),
    "box": (
        grounding.correct,
        "box_match",
        "Share of boxes with an IoU of at least 0.5 with the expected one, and of points in it.",
    ),
    "edit": (
        transcription.score,
        "edit_similarity",
        "Edit distance of the texts without markup, as a share of the longer, from 1; for a table the F1 of its cells.",
    ),
}
"""Name -> rule, name of the metric, and its sentence in reports."""


@dataclass(frozen=True)
class Score:
    """A score of plain data.

    Attributes:
        metric: its name in results; `about`: its definition, in a sentence.
        rule: function of an answer and an expected one that returns 0 to 1, or None if it finds no answer in the text; of
            several expected ones the best counts.
        choice: why `auto` chose it, in a sentence; "" if it was named.
    """

    metric: str
    about: str
    rule: Rule
    choice: str = ""

    def applied(self, answers: SuiteAnswers) -> SuiteAnswers:
        """The answers with this score. Raises `UserError` if a user's function fails."""
        return dataclasses.replace(answers, samples=tuple(map(self._scored, answers.samples)))

    def _scored(self, sample: AnsweredQuestion) -> AnsweredQuestion:
        if sample.missing:
            return sample
        try:
            table = transcription.is_table(sample.expected)  # in Markdown it has the separator in it
            targets = [sample.expected] if table else sample.expected.split(SEPARATOR)
            text = unicodedata.normalize("NFC", sample.text)
            values = [self.rule(text, unicodedata.normalize("NFC", expected)) for expected in targets]
            value = max((float(value) for value in values if value is not None), default=None)
            number = 0.0 if value is None else value
        except Exception as error:  # whatever a user's own function raises
            raise UserError(f"--score {self.metric} fails on sample '{sample.id}' ({error!r}); correct it") from error
        if not 0 <= number <= 1:
            raise UserError(f"--score {self.metric} gives {value:g} for sample '{sample.id}'; give 0 to 1, or None")
        return dataclasses.replace(sample, score=number, parsed=value is not None)


def named_score(name: str, suites: Sequence[LoadedSuite] = ()) -> Score | None:
    """The score with a name, checked before any question is asked; None for `auto`.

    Args:
        name: `auto`, one of `RULES`, `regex:PATTERN` (the last match, or its first group, is compared as by `exact`), or
            `FILE.py:FUNCTION` or `MODULE:FUNCTION`, a function of answer and expected answer.
        suites: the suites to score.

    Raises:
        UserError: there is no such score or function, the pattern is invalid, or a suite has its own score.
    """
    if name == AUTO:
        return None
    if scored := [suite.name for suite in suites if CUSTOM not in suite.tasks]:
        raise UserError(f"--score {name} is for your own data; suite {scored[0]} has a score, leave it out")
    if name in RULES:
        return _named(name)
    kind, colon, rest = name.partition(":")
    if kind == "regex" and rest:
        try:
            pattern = re.compile(rest)
        except re.error as error:
            raise UserError(f"--score {name}: the pattern is invalid ({error}); correct it") from error

        def matched(answer: str, expected: str) -> float | None:
            matches = list(pattern.finditer(answer))
            return exact(matches[-1][1 if pattern.groups else 0] or "", expected) if matches else None

        return Score("regex_match", f"Exact match of the last text that the pattern {rest} finds.", matched)
    if not colon:
        names = ", ".join([AUTO, *RULES])
        raise UserError(
            f"--score {name} is none of {names}, regex:PATTERN and FILE.py:FUNCTION{did_you_mean(name, [AUTO, *RULES])}"
        )
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise ImportError(f"{place} is not a module")
            module: Any = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function = getattr(module, attribute)
    except Exception as error:  # whatever a user's own file raises
        raise UserError(f"--score {name} can't be loaded ({error}); give FILE.py:FUNCTION") from error
    if not callable(function):
        raise UserError(f"--score {name} is no function; give one of answer and expected answer")
    return Score(name, f"By the function {name}.", function)


def choose_score(named: Score | None, suite: LoadedSuite, baseline: SuiteAnswers) -> Score | None:
    """The score of a suite's answers: the named one, or one chosen by the baseline's first answers; None: the suite's own."""
    if named is not None or CUSTOM not in suite.tasks:
        return named
    first = [sample for sample in baseline.samples if not sample.missing][:LOOK]
    names = ("exact", "normalized", "contains")
    right = {name: sum(sample.score for sample in map(_named(name)._scored, first)) for name in names}
    # `contains` accepts most; a stricter rule is taken if it loses at most a fifth of that, as verbose answers are then rare.
    name = next(name for name in names if right[name] >= SHARE * right["contains"])
    choice = ""
    if name != "exact":
        counts = ", ".join(f"{count:.0f} by {other}" for other, count in right.items())
        choice = f"Scored by `{name}`: of the baseline's first {len(first)} answers {counts} are right; --score takes another."
    return dataclasses.replace(_named(name), choice=choice)


def _named(name: str) -> Score:
    rule, metric, about = RULES[name]
    return Score(metric, about, rule)


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles; texts of only articles or punctuation are kept.

    Small numbers are digits, digits those of ASCII, and numbers keep their sign. Marks that combine with a letter, such as the
    vowel signs of Hindi and Thai, belong to it.
    """
    plain = "".join(
        character for character in folded(text) if unicodedata.category(character) != "Cf"
    )  # invisible ones
    plain = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), plain)
    plain = _SIGN.sub("-", plain)
    plain = re.sub(r"(?<!\d)[.,](?!\d)|[.,](?!\d)", " ", plain)
    plain = "".join(c if c in ".,%'-_" or unicodedata.category(c)[0] in "LMN" else " " for c in plain)
    plain = re.sub(rf"(?<={_UNSPACED.pattern})(?=-?\d)|(?<=\d)(?={_UNSPACED.pattern})", " ", plain)
    stripped = (word.rstrip("'-").lstrip("'" if re.match(r"-\.?\d", word) else "'-") for word in plain.split())
    words = [scoring.NUMBERS.get(word, word) for word in stripped if word]
    return [word for word in words if word not in scoring.ARTICLES] or words or text.split()

"""Text and tables that models write down from images: one reader for the forms in which they write, and scores.

    score("Wet paint", "# **Wet  paint**")                                     1.0
    score("<table><tr><td>a<td>b</table>", "| a | b |\\n|---|---|\\n| 1 | 2 |")    0.667: two cells of four, and none too many

Markup does not count: code fences, Markdown's headings, bold type, pictures and table rules, and HTML's tags. Case and
punctuation do; runs of spaces and line breaks are one space, and quotation marks and dashes are of one kind.

Text is scored by the *edit similarity* 1 - d / n: the edit distance over the length of the longer text, as OmniDocBench's
text (Ouyang et al. 2024, arXiv 2412.07626, section 4.2) and ANLS, but without a threshold. A table is scored by the *F1 of its
cells*: rows are aligned in order, and within two rows their cells, so that the most cells agree (two nested longest common
subsequences: the factored alignment of GriTS, Smock et al. 2022, arXiv 2203.12555, section 4, for exact texts). Empty cells do
not count, so that spans may be written in any way. Tables may be HTML, Markdown or OTSL (`<fcel>`, Lysak et al. 2023, arXiv
2305.03393).
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from vlmcompress.evaluation.accuracy.scoring import levenshtein

_FENCED = re.compile(r"```[\w-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_INLINE = re.compile(r"</?(?:b|i|u|s|em|strong|sub|sup|span|mark|small)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z][^<>]*>", re.IGNORECASE)
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_HEADING = re.compile(r"^[ \t]*#{1,6}[ \t]+", re.MULTILINE)
_BOLD = re.compile(r"\*\*(?=\S)|(?<=\S)\*\*")
_BARS = re.compile(r"(?<!\\)\|")
_ESCAPED = re.compile(r"\\([|*_#])")
_ALIKE = str.maketrans("“”„‘’‚–—−", "\"\"\"'''---")
_OTSL = re.compile(r"<(?:[felux]cel|ched|rhed|srow)>")
_BLANK = re.compile(r"\b(?:blank|empty|no (?:visible |readable |legible )?text)\b", re.IGNORECASE)
_SHORT = 12  # words of an answer that says that a page is blank


def score(answer: str, expected: str) -> float | None:
    """The F1 of cells for an expected text that is a table, else the edit similarity; None: the answer has no table, no text.

    Where nothing is expected, as on a blank page, an empty answer is right, and so is a short one that calls it blank.
    """
    if is_table(expected):
        return cell_f1(answer, expected)
    text, target = plain(answer), plain(expected)
    if not target:
        return float(not text or (len(text.split()) <= _SHORT and _BLANK.search(text) is not None))
    return 1 - levenshtein(text, target) / max(len(text), len(target)) if text else None


def is_table(text: str) -> bool:
    """Whether a text is one table and nothing else."""
    lines = _lines(text)
    tagged = re.fullmatch(r"<table\b.*</table>", text.strip(), re.DOTALL | re.IGNORECASE)
    return bool(tagged) or (bool(lines) and all(line[0] == line[-1] == "|" for line in lines))


def plain(text: str) -> str:
    """A text without markup, in one line."""
    text = _TAG.sub(" ", _INLINE.sub("", _PICTURE.sub(" ", _unfenced(text))))
    lines = _lines(_BOLD.sub("", _HEADING.sub("", text)))
    lines = [_ESCAPED.sub(r"\1", _BARS.sub(" ", line) if line.startswith("|") else line) for line in lines]
    return " ".join(unicodedata.normalize("NFKC", html.unescape(" ".join(lines))).translate(_ALIKE).split())


def cell_f1(answer: str, expected: str) -> float | None:
    """The F1 of the cells of the answer's tables, see the module; None: it has none."""
    answered, target = cells(answer), cells(expected)
    filled = [sum(bool(cell) for row in rows for cell in row) for rows in (answered, target)]
    if not filled[0] or not filled[1]:
        return None
    same = _aligned(answered, target, lambda a, b: _aligned(a, b, lambda x, y: int(x == y != "")))
    return 2 * same / sum(filled)


def cells(text: str) -> list[list[str]]:
    """The cells of all tables in a text, by row."""
    text = _unfenced(text)
    if _OTSL.search(text):
        rows = [_OTSL.split(row)[1:] for row in text.split("<nl>")]
    elif re.search(r"<t[dh]\b", text, re.IGNORECASE):
        # Closing tags may be left out, and are where an answer is cut off.
        rows = [
            re.split(r"<t[dh]\b[^>]*>", row, flags=re.IGNORECASE)[1:]
            for row in re.split(r"<tr\b[^>]*>|</table>", text, flags=re.IGNORECASE)
        ]
    else:
        lines = [line for line in _lines(text) if line.startswith("|") or line.count("|") > 1]
        rows = [_BARS.split(line.strip("|")) for line in lines]
    return [[plain(cell) for cell in row] for row in rows if row]


def _lines(text: str) -> list[str]:
    """The lines of a text that are neither empty nor the rule below a Markdown table's head."""
    lines = map(str.strip, text.splitlines())
    return [line for line in lines if line and not ("---" in line and {*line} <= {*"|:- \t"})]


def _unfenced(text: str) -> str:
    """The content of a text's code fences if it is most of the text, else the text without the lines of the fences."""
    inside = "\n".join(_FENCED.findall(text))
    return inside if 2 * len(inside) > len(text) else re.sub(r"^[ \t]*```.*$", "", text, flags=re.MULTILINE)


def _aligned(a: Sequence[Any], b: Sequence[Any], value: Callable[[Any, Any], int]) -> int:
    """The highest total value of pairs of items of `a` and `b` that keep both orders."""
    best = [0] * (len(b) + 1)
    for x in a:
        above, best = best, [0]
        for column, y in enumerate(b):
            best.append(max(above[column + 1], best[-1], above[column] + value(x, y)))
    return best[-1]

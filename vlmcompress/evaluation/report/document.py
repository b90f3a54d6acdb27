"""A report as data: sections of lines, tables and drawings, which `text` renders as text and Markdown, `html` as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup, escape

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.results import Scored, Verdict

_SIGNS = {"pass": "\N{CHECK MARK}", "fail": "\N{BALLOT X}", "inconclusive": "?"}


class Cell(str):
    """A text that a page shows as `markup`. A chart has an empty text: a column of charts is on pages only."""

    __slots__ = ("markup",)
    markup: Markup

    def __new__(cls, text: str, markup: Markup) -> Cell:
        cell = super().__new__(cls, text)
        cell.markup = markup
        return cell

    def __html__(self) -> str:
        return self.markup


@dataclass(frozen=True)
class Lines:
    """Lines of text: paragraphs, those in small print, headings within a section, items of a list, or a drawing's legend."""

    lines: Sequence[str]
    kind: Literal["text", "note", "heading", "list", "legend"] = "text"


@dataclass(frozen=True)
class Table:
    """A table. `look` has classes of the style sheet, `strong` the numbers of its main rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    look: str = ""
    strong: Sequence[int] = ()
    kind = "table"


@dataclass(frozen=True)
class Plots:
    """Plots with titles, see `plots.scatter`; on a page only."""

    plots: Sequence[tuple[str, Mapping[str, Any]]]
    kind = "plots"


@dataclass(frozen=True)
class Examples:
    """Samples, with the places that answers about boxes name on a picture, by side, and pictures as base64 PNG."""

    samples: Sequence[tuple[Scored, Mapping[str, str], Sequence[str]]]
    kind = "examples"


Part = Lines | Table | Plots | Examples


@dataclass(frozen=True)
class Section:
    """A section; `name` is its entry in the page's list of sections, by default the title, and `verdict` follows the title."""

    title: str
    parts: Sequence[Part]
    id: str = ""
    name: str = ""
    verdict: Verdict | None = None


def note(line: str) -> Lines:
    """A paragraph in small print."""
    return Lines([line], "note")


def verdict_cell(verdict: Verdict) -> Cell:
    """A verdict in a word; on a page with its sign and colour."""
    text = words.VERDICTS[verdict]
    return Cell(text, Markup('<span class="pill {}">{} {}</span>').format(verdict, _SIGNS[verdict], text))


def worse(value: str) -> Cell:
    """A value that a page highlights as bad."""
    return Cell(value, Markup('<span class="worse">{}</span>').format(words.typeset(value)))


def layer_cell(name: str) -> Cell:
    """The name of a layer, which may break at its dots."""
    return Cell(name, Markup(".<wbr>").join(escape(part) for part in name.split(".")))

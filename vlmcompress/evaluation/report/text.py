"""Sections as text: for a terminal, and as Markdown for `report.md`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from vlmcompress.evaluation.report import sections, words
from vlmcompress.evaluation.report.document import Cell, Examples, Lines, Section, Table
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.utils.text import table as aligned

_MARKS = {
    "pass": "\N{WHITE HEAVY CHECK MARK}",
    "fail": "\N{CROSS MARK}",
    "can't tell": "\N{WHITE QUESTION MARK ORNAMENT}",
}
_EXAMPLES, _LONGEST = 8, 120  # samples, and characters of a cell


def tables(findings: Findings) -> str:
    """What was measured, for a terminal."""
    results = findings.results
    return f"{results.candidate.name} against {results.baseline.name}\n\n{terminal(sections.measured(findings))}"


def terminal(content: Iterable[Section]) -> str:
    """Sections for a terminal, without drawings and small print."""
    parts = []
    for section in content:
        lines = [section.title]
        for part in section.parts:
            if isinstance(part, Table):
                lines.append(aligned([[words.printable(cell) for cell in row] for row in _columns(part)]))
            elif isinstance(part, Lines) and part.kind not in ("note", "legend"):
                lines += [("\n" if part.kind == "heading" else "  ") + words.printable(line) for line in part.lines]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def markdown(findings: Findings) -> str:
    """The content of `report.md`: the verdict first."""
    results = findings.results
    title = f"{results.candidate.name} against {results.baseline.name}"
    return markdown_document(title, findings.headline, [words.glossary(results)], sections.all_sections(findings))


def markdown_document(title: str, headline: Sequence[str], notes: Sequence[str], content: Iterable[Section]) -> str:
    """A Markdown document."""
    blocks = [f"# {escape(title)}", "  \n".join(map(escape, headline)), *map(escape, notes)]
    for section in content:
        blocks.append(f"## {escape(section.title)}")
        for part in section.parts:
            if isinstance(part, Table):
                blocks.append(markdown_table(_columns(part)))
            elif isinstance(part, Examples):
                blocks.append(markdown_table(_examples(part)))
            elif isinstance(part, Lines) and part.kind != "legend":
                start = {"heading": "### ", "list": "- "}.get(part.kind, "")
                blocks.append(
                    ("\n" if part.kind == "list" else "\n\n").join(start + escape(line) for line in part.lines)
                )
    return "\n\n".join(blocks) + "\n"


def _columns(table: Table) -> list[list[str]]:
    """Head and rows, without the columns that have no text."""
    kept = [i for i in range(len(table.head)) if any(row[i] for row in table.rows)]
    return [[row[i] for i in kept] for row in (table.head, *table.rows)]


def _examples(examples: Examples) -> list[list[str]]:
    rows = [["family", "question", "expected", "baseline", "candidate"]]
    for sample, _, _ in examples.samples[:_EXAMPLES]:
        texts = (sample.question, sample.expected, sample.baseline, sample.candidate)
        cut = (t if len(t) <= _LONGEST else t[: _LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}" for t in texts)
        rows.append([sample.family, *cut])
    return rows


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head, and verdicts get a sign."""
    cells = [
        [f"{_MARKS[cell]} {cell}" if isinstance(cell, Cell) and cell in _MARKS else escape(cell) for cell in row]
        for row in rows
    ]
    cells.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def escape(text: str) -> str:
    """The text as one line of Markdown with all markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(words.printable(text).split()))

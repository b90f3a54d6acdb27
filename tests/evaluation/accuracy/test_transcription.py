"""Transcribed text and tables: markup does not count, an edit counts as one character, a cell as one of all."""

from __future__ import annotations

import time
from random import Random

import pytest

from vlmcompress.evaluation.accuracy.transcription import cell_f1, cells, is_table, plain, score

TABLE = "| a | b |\n|:--|---|\n| 1 | |\n| 2 | 3 \\| 4 |"


@pytest.mark.parametrize(
    "answer",
    [
        "Wet paint",
        " Wet\n\npaint \n",
        "## **Wet paint**",
        "```markdown\n# Wet\npaint\n```",
        "```\nWet paint",  # cut off
        "<h1>Wet</h1><p>p<b>ai</b>nt</p>",
        "![a sign](sign.png)\nWet paint",
        "Wet\n---\npaint",
    ],
)
def test_markup_of_text(answer: str) -> None:
    assert plain(answer) == "Wet paint" and score(answer, "Wet paint") == 1


def test_equivalent_signs_are_equal() -> None:
    assert plain("“H<sub>2</sub>O” &amp; ‘½’ – ３ < 4") == "\"H2O\" & '1⁄2' - 3 < 4"


def test_text_by_edit_distance() -> None:
    text = "".join(Random(0).choices("abcdefgh", k=200))
    changed = "".join("#" if index % 10 == 3 else character for index, character in enumerate(text))
    assert score(changed, text) == score(text, changed) == pytest.approx(0.9)
    assert score(text[:150], text) == 0.75
    assert score("WET paint", "Wet paint") == pytest.approx(7 / 9)
    assert score("", text) is None and score("```\n```", text) is None


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("", 1),
        ("```\n\n```", 1),
        ("This page is blank.", 1),
        ("There is no visible text in the image.", 1),
        ("Blank cheque no. 1 of the Bank of Finland, to be paid to whoever brings it", 0),
        ("Wet paint", 0),
    ],
)
def test_blank_pages(answer: str, right: float) -> None:
    assert score(answer, "") == score(answer, " \n") == right


@pytest.mark.parametrize(
    "answer",
    [
        TABLE,
        f"Here it is:\n\n{TABLE}\n\nIt has 3 rows.",
        f"```markdown\n{TABLE}\n```",
        "a | b |\n1 | |\n2 | 3 \\| 4 |",
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tr><td>1</td><td/></tr><tr><td>2</td><td>3 | 4</td></tr></table>",
        "```html\n<TABLE border=1>\n<tr>\n<td colspan=1>a<td>b\n<tr><td>1<tr><td> 2<td>3 \\| 4",
        "<fcel>a<fcel>b<nl><fcel>1<ecel><nl><fcel>2<fcel>3 \\| 4<nl>",
    ],
)
def test_forms_of_tables(answer: str) -> None:
    assert [[cell for cell in row if cell] for row in cells(answer)] == [["a", "b"], ["1"], ["2", "3 | 4"]]


def test_tables_by_cells() -> None:
    table = "| a | b | c |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | | 6 |"
    assert (
        is_table(table)
        and is_table("<table><tr><td>1</table>")
        and not is_table(f"Table 1\n{table}")
        and not is_table("")
    )
    assert score(table, table) == 1 and score("a b c 1 2 3 4 6", table) is None and score("", table) is None
    assert score(table.replace("6", "5"), table) == 2 * 7 / 16  # a cell
    assert score("| a | b | c |\n| 4 | | 6 |", table) == 2 * 5 / 13  # a row is lost
    assert score("| a | c |\n| 1 | 3 |\n| 4 | 6 |", table) == 2 * 6 / 14  # a column is lost
    assert score(f"| x | y | z |\n{table}", table) == 2 * 8 / 19
    assert cell_f1("| a | 1 | 4 |\n| b | 2 | |\n| c | 3 | 6 |", table) == 2 * 3 / 16  # on its side: a diagonal is left


def test_answers_without_end() -> None:
    """What a broken model writes takes no time that matters: no pattern backtracks."""
    start = time.process_time()
    for text in ("-" * 8000 + "x", "**a " * 4000, "<t<" * 4000, "|" * 8000, "```\n" * 4000, "![" * 4000, "<td>" * 4000):
        plain(text), cells(text)
        score(text, "Wet paint")
    assert time.process_time() - start < 5

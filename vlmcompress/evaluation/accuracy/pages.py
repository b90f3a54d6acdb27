"""Pages of text for the suite `pages`, drawn here and not downloaded.

    text("columns", 7)     the text of the eighth page with two columns: random words, numbers and codes
    draw("columns", 7)     its image

A page is a function of its family and number, so that two runs have the same pages as long as Pillow draws alike. Fonts are the
two that Pillow brings: a sans serif at 15 to 22 pixels, and a bitmap font, doubled, as of a receipt.
A label has few words of 20 pixels in 144 x 144, which a small tower can show; a page takes 300 to 900 tokens of 28 x 28 pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from vlmcompress.evaluation.accuracy import local_data, transcription
from vlmcompress.models.data.samples import MARK, LazyImages
from vlmcompress.utils.errors import UserError

FAMILIES = {"paragraphs": 80, "columns": 80, "table": 80, "noise": 60, "turned": 60, "label": 40, "blank": 20}
"""Family -> number of pages. `noise`: paragraphs with speckles, little contrast and blur; `turned`: by 1 to 5 degrees."""
ASK = "Write down all text in the image, in reading order, and nothing else."
ASK_TABLE = "Write down the table in the image as an HTML table, and nothing else."
_WORDS = """
acorn anchor apple arrow badge barrel basket beacon bell bottle branch bridge bucket button cabin candle canvas carpet
castle cedar chain chalk cherry circle clay clock cloud coast copper corner cotton cradle crown desert dragon drawer
engine feather fence field flute forest fossil fountain garden glass grain granite hammer harbor hazel helmet hollow
honey island ivory jacket journal kettle ladder lantern leather ledger lemon linen marble market meadow mirror mustard
needle nickel oak orchard paddle paper pebble pepper pillow pine planet pocket quarry quartz quilt ribbon river rocket
saddle sand scarlet shadow shelf silver slate spiral sponge stable stone summer sunset table temple thread ticket timber
tunnel valley velvet violet wagon walnut water wheel willow window winter wool yellow zinc
"""
WORDS = _WORDS.split()
_MONTHS = "January February March April May June July August September October November December"
MONTHS = _MONTHS.split()
MARGIN, GUTTER = 28, 40  # around a page, between its columns; pixels


def text(family: str, number: int) -> str:
    """The text of a page: paragraphs, lines of a label, a table in Markdown, or nothing."""
    if family == "table":
        head, *rows = [f"| {' | '.join(row)} |" for row in _table(Random(f"{family} {number}"))]
        return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])
    return "\n\n".join(_paragraphs(family, Random(f"{family} {number}")))


def _paragraphs(family: str, rng: Random) -> list[str]:
    if family == "blank":
        return []
    if family == "label":
        short = [word for word in WORDS if len(word) < 8]
        return [
            rng.choice(short).title() if line % 2 else _number(rng, dated=False) for line in range(rng.randint(2, 4))
        ]
    heading = " ".join(rng.sample(WORDS, rng.randint(2, 4))).title()
    return [heading, *(" ".join(_sentence(rng) for _ in range(rng.randint(2, 4))) for _ in range(rng.randint(2, 3)))]


def _sentence(rng: Random) -> str:
    words = rng.sample(WORDS, rng.randint(5, 10))
    if rng.random() < 0.5:
        words[rng.randrange(1, len(words))] = _number(rng)
    if rng.random() < 0.3:
        words[2] += ","
    return f"{words[0].capitalize()} {' '.join(words[1:])}{rng.choice('...!?')}"


def _number(rng: Random, dated: bool = True) -> str:
    """A number, share, price, code or, if `dated`, date."""
    kinds = [
        f"{rng.randrange(1000, 100_000):,}",
        f"{rng.randrange(2, 100)}%",
        f"${rng.randrange(1, 1000)}.{rng.randrange(100):02d}",
        f"{''.join(rng.sample('ABCDEFGHKLMNPRSTVWXYZ', 2))}-{rng.randrange(1000, 10_000)}",
        f"{rng.randrange(1, 29)} {rng.choice(MONTHS)} {rng.randrange(1900, 2030)}",
    ]
    return rng.choice(kinds if dated else kinds[:-1])


def _table(rng: Random) -> list[list[str]]:
    """Rows of cells, with a head; a tenth of the other cells is empty, but none of the first column."""
    width = rng.randint(3, 5)
    head = [word.title() for word in rng.sample(WORDS, width)]
    rows = [
        [rng.choice(WORDS), *("" if rng.random() < 0.1 else _number(rng) for _ in head[1:])]
        for _ in range(rng.randint(4, 8))
    ]
    return [head, *rows]


class _Face:
    """A font with its line height. `size` in pixels; 0: the bitmap font, doubled."""

    def __init__(self, size: int):
        self.doubled = not size
        self.font: Any = ImageFont.load_default(size) if size else ImageFont.load_default_imagefont()
        self.line = round(1.45 * size) if size else 28

    def width(self, line: str) -> int:
        return round(self.font.getlength(line)) * (1 + self.doubled)

    def wrapped(self, paragraph: str, width: int) -> list[str]:
        lines: list[str] = []
        for word in paragraph.split():
            if lines and self.width(f"{lines[-1]} {word}") <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
        return lines

    def print(self, page: Image.Image, place: tuple[int, int], line: str, ink: tuple[int, ...]) -> None:
        mask = Image.new("L", (self.width(line) // (1 + self.doubled) + 4, self.line))
        ImageDraw.Draw(mask).text((0, 0), line, 255, self.font)
        if self.doubled:
            mask = mask.resize((2 * mask.width, 2 * mask.height), Image.Resampling.NEAREST)
        page.paste(ink, place, mask)


def draw(family: str, number: int) -> Image.Image:
    """The image of a page, in RGB."""
    rng = Random(f"look of {family} {number}")
    paper, ink = (tuple(rng.randint(*span) for _ in range(3)) for span in ((228, 255), (0, 60)))
    if family == "noise":
        paper, ink = (190,) * 3, (95,) * 3
    face = _Face(20 if family == "label" else rng.choice((15, 16, 17, 18, 20, 22, 0)))
    content = Random(f"{family} {number}")
    if family == "table":
        size, lines, bars = _table_layout(_table(content), face, ruled=rng.random() < 0.5)
    else:
        (size, lines), bars = _text_layout(family, _paragraphs(family, content), face), []
    page = Image.new("RGB", size, paper)
    for bar in bars:
        page.paste(ink, bar)
    for left, top, line, chosen in lines:
        chosen.print(page, (left, top), line, ink)
    if family == "turned":
        angle = rng.choice((-1, 1)) * rng.uniform(1, 5)
        page = page.rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor=paper)
    if family == "noise" or (family == "blank" and rng.random() < 0.5):
        speckles = np.random.RandomState(rng.randrange(1 << 30)).normal(0, 16, (*page.size[::-1], 1))
        blurred = np.asarray(page.filter(ImageFilter.GaussianBlur(0.6)), dtype=np.float64)
        page = Image.fromarray((blurred + speckles).clip(0, 255).astype(np.uint8))
    return page


Lines = list[tuple[int, int, str, _Face]]  # left, top, text, font


def _text_layout(family: str, paragraphs: list[str], face: _Face) -> tuple[tuple[int, int], Lines]:
    """Size and lines of a page of text: a heading above one or two columns."""
    if family == "label":
        return (144, 144), [(8, 10 + 32 * index, line, face) for index, line in enumerate(paragraphs)]
    if family == "blank":
        return (480, 360), []
    large, width, bottom = _Face(26), 300 if family == "columns" else 520, 0
    heading, *rest = paragraphs
    lines = [(MARGIN, MARGIN, heading, large)]
    columns = [rest[:1], rest[1:]] if family == "columns" else [rest]
    for column, together in enumerate(columns):
        top = MARGIN + large.line + 12
        for paragraph in together:
            for line in face.wrapped(paragraph, width):
                lines.append((MARGIN + column * (width + GUTTER), top, line, face))
                top += face.line
            top += face.line // 2
        bottom = max(bottom, top)
    return (2 * MARGIN + len(columns) * (width + GUTTER) - GUTTER, bottom + MARGIN), lines


def _table_layout(
    rows: list[list[str]], face: _Face, ruled: bool
) -> tuple[tuple[int, int], Lines, list[tuple[int, int, int, int]]]:
    """Size, lines and bars (left, top, right, bottom) of a table with lines between all cells or below the head alone."""
    widths = [max(map(face.width, column)) + 26 for column in zip(*rows, strict=True)]
    lefts = [MARGIN + sum(widths[:column]) for column in range(len(widths) + 1)]
    tops = [MARGIN + row * (face.line + 10) for row in range(len(rows) + 1)]
    lines = [
        (left + 13, top + 6, cell, face)
        for top, row in zip(tops, rows, strict=False)
        for left, cell in zip(lefts, row, strict=False)
    ]
    bars = [(lefts[0], top, lefts[-1], top + 1) for top in (tops if ruled else [*tops[:2], tops[-1]])]
    bars += [(left, tops[0], left + 1, tops[-1]) for left in lefts if ruled]
    return (lefts[-1] + MARGIN, tops[-1] + MARGIN), lines, bars


def load(data: str | None = None, **_: Any) -> dict[str, Any]:
    """The pages for lm-eval as `{"test": Dataset}`, or rows with the columns `image` and `answer` at `data`.

    Raises:
        UserError: there is nothing at `data`, or a row has no answer.
    """
    import datasets

    if data:
        loaded = local_data.load("pages", data=data)
        local_data.need({"image", "answer"}, loaded["test"], Path(data))
        if None in loaded["test"]["answer"]:
            raise UserError(f"{data} has rows without an answer; write an empty text for a page without text")
        return loaded
    rows = [
        {"id": f"{family}-{number:02d}", "family": family, "number": number, "answer": text(family, number)}
        for family, count in FAMILIES.items()
        for number in range(count)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def images(row: Mapping[str, Any]) -> LazyImages:
    """The image of a row, or of the page that it names."""
    if "image" in row:
        return local_data.images(row)
    return LazyImages([_png(row["family"], row["number"])], f"sample '{row['id']}'")


@functools.cache
def _png(family: str, number: int) -> bytes:
    return local_data.png(draw(family, number))


def question(row: Mapping[str, Any]) -> str:
    return MARK + (row.get("question") or (ASK_TABLE if transcription.is_table(row["answer"]) else ASK))


def scores(row: Mapping[str, Any], answers: list[str]) -> dict[str, float]:
    """The edit similarity, or the F1 of a table's cells; and whether there is an answer."""
    value = transcription.score(answers[0], row["answer"])
    return {"edit_similarity": value or 0.0, "parsed": float(value is not None)}

"""Labels to read: grids of cells with letters, handwritten digits or nothing, whose whole text is the answer.

    Read all text.    KVX 7          one line of the answer for each row that has text
                      4 HL

Letters and digits are those of scenes, as large as the towers of the demos can read; two to six cells of a label have text. For
training, each of its lines is asked for as well. The frozen splits do not hold this family.
"""

from collections.abc import Iterator
from itertools import count
from random import Random

from .rows import VARIANTS, png
from .scene import Cell, Scene, sample_digit, sample_text
from .vocab import BACKGROUNDS, SPLITS

QUESTION, LINE = "Read all text.", "Read row {}."
CELLS = 2, 6  # with text
DIGITS = 0.3  # share of these cells
_BASE = 70_000_000  # of seeds, below those of boxes


def sample_page(rng: Random, grid: tuple[int, int], split: str) -> Scene:
    """Draw a random label: words of two or three letters, and digits, on a background as of scenes."""
    rows, columns = grid
    cells = [Cell("nothing")] * (rows * columns)
    for place in rng.sample(range(len(cells)), rng.randint(*CELLS)):
        cells[place] = sample_digit(rng, split) if rng.random() < DIGITS else sample_text(rng, rng.choice((2, 3, 3)))
    return Scene(rows, columns, rng.choice(tuple(BACKGROUNDS)), cells, rng.randrange(1 << 30))


def lines(page: Scene) -> list[str]:
    """The text of each row from left to right, with a space between cells; empty for a row without text."""
    rows = ([page.at(row, column).name for column in range(page.columns)] for row in range(page.rows))
    return [" ".join(filter(None, names)) for names in rows]


def asked_pages(split: str, variant: str) -> Iterator[tuple[Scene, list[tuple[str, str]]]]:
    """Labels with their questions, that for all text first; without end, by the arguments alone."""
    for number in count():
        rng = Random(_BASE + SPLITS[split][0] + number)
        page = sample_page(rng, rng.choice(VARIANTS[variant]), split)
        turns = [(LINE.format(row), line) for row, line in enumerate(lines(page), 1) if line]
        yield page, [(QUESTION, "\n".join(line for _, line in turns)), *turns]


def page_rows(split: str, variant: str, number: int) -> list[dict]:
    """The first `number` rows, as those of frozen families: one label with all its text each."""
    rows = []
    for page, [(question, answer), *_] in asked_pages(split, variant):
        if len(rows) == number:
            return rows
        name = f"{split}-{variant}-page-{len(rows):04d}"
        rows.append(
            {"id": name, "image": [png(page.draw()[0])], "question": question, "answer": answer, "family": "page"}
        )
    raise AssertionError("asked_pages does not end")

"""What a picture says, in words: the text that demo-smol's tower learns to write and its language model learns to read.

Nine entries of nine words, each a token of the language model, so as many as there are visual tokens. An entry is a place of
a scene or a bar of a chart:

    row 1 column 2 : large red circle white          the last word is the background
    row 1 column 3 : nothing . . white
    row 2 column 1 : digit 7 . white
    row 2 column 2 : A C E white
    the blue bar : 3 . . . white                     a chart; entries after its bars have ``nothing`` and full stops
"""

from collections.abc import Callable

from eval.world.chart import Chart
from eval.world.scene import Cell, Scene

ENTRIES = WORDS = 9


def written(image: Scene | Chart) -> list[str]:
    """The 81 words of an image; all but digits and marks begin with a space, as tokens of a text do."""
    ground = f" {image.background}"
    if isinstance(image, Chart):
        entries = [[" the", f" {colour}", " bar", ":", str(height), ".", ".", "."] for colour, height in image.bars]
        entries += [[" nothing", *"......."]] * (ENTRIES - len(entries))
    else:
        entries = []
        for number, cell in enumerate(image.cells):
            row, column = divmod(number, image.columns)
            entries.append([" row", str(row + 1), " column", str(column + 1), ":", *_content(cell)])
    return [word for entry in entries for word in (*entry, ground)]


def _content(cell: Cell) -> list[str]:
    """Three words for what is at a place."""
    if cell.kind == "shape":
        return [" large" if cell.large else " small", f" {cell.colour}", f" {cell.name}"]
    if cell.kind == "digit":
        return [" digit", cell.name, "."]
    return [f" {letter}" for letter in cell.name] if cell.kind == "text" else [" nothing", ".", "."]


def token_ids(words: list[str], encode: Callable[[str], tuple[int, ...]]) -> list[int]:
    """The token of each word.

    Raises:
        ValueError: a word is more than one token.
    """
    encoded = [encode(word) for word in words]
    if any(len(ids) != 1 for ids in encoded):
        raise ValueError(f"not one token: {[w for w, ids in zip(words, encoded, strict=True) if len(ids) != 1]}")
    return [ids[0] for ids in encoded]

"""How a processor tokenizes an image: the part that each visual token shows, and settings that give fewer tokens.

Both are computed from an image's size alone, by functions of the families' files. A `ModelSpec.layout` repeats the arithmetic
of the family's processor and model in transformers, without opening an image. A `Images.sizes` lists settings from the one
with the fewest tokens to the processor's current one. All of them keep the image's aspect ratio and exist in the family's own
processor, so that every engine that reads the checkpoint's processor files produces images of that size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Box = tuple[float, float, float, float]
"""A box: left, top, right and bottom, in pixels of the original image; it extends beyond the image where padding is shown."""


@dataclass(frozen=True)
class Piece:
    """A part of an image: `rows x columns` tokens in raster order. For a very narrow image `columns` may be 0.

    newlines: whether a token that shows nothing ends each row ("rows"), ends the piece ("end"), or does not exist ("").
    tiles: encoder inputs whose tokens are joined in the piece; None: the piece is one encoder input.
    """

    rows: int
    columns: int
    box: Box
    newlines: str = ""
    tiles: int | None = None

    @staticmethod
    def whole(rows: int, columns: int, width: int, height: int) -> Piece:
        """The piece that shows a whole image in `rows x columns` tokens."""
        return Piece(rows, columns, (0.0, 0.0, float(width), float(height)))

    @property
    def tokens(self) -> int:
        """Number of visual tokens of the piece, newlines included."""
        return self.rows * self.columns + {"": 0, "end": 1, "rows": self.rows}[self.newlines]

    def cells(self) -> Iterator[Box | None]:
        """The box that each token shows; None for a newline."""
        left, top, right, bottom = self.box
        wide, high = (right - left) / max(self.columns, 1), (bottom - top) / max(self.rows, 1)
        for row in range(self.rows):
            for column in range(self.columns):
                x, y = left + column * wide, top + row * high
                yield x, y, x + wide, y + high
            if self.newlines == "rows":
                yield None
        if self.newlines == "end":
            yield None


@dataclass(frozen=True)
class Layout:
    """The visual tokens of one image, in the order of the prompt: those of each piece in turn."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of_tiles(n: int, across: int, down: int, width: int, height: int) -> Layout:
        """Tiles of `n x n` tokens that fill the image, row by row, then the whole image; only the latter if there is one
        tile."""
        whole = Piece.whole(n, n, width, height)
        if across * down == 1:
            return Layout((whole,))
        xs = [width * i / across for i in range(across + 1)]
        ys = [height * i / down for i in range(down + 1)]
        tiles = [Piece(n, n, (xs[c], ys[r], xs[c + 1], ys[r + 1])) for r in range(down) for c in range(across)]
        return Layout((*tiles, whole))

    @property
    def tokens(self) -> int:
        """Number of visual tokens of the image."""
        return sum(piece.tokens for piece in self.pieces)

    def cells(self) -> list[Box | None]:
        """The box that each token shows; None for one that shows nothing."""
        return [cell for piece in self.pieces for cell in piece.cells()]

    def grids(self) -> list[tuple[tuple[int, int, int], list[int]]]:
        """The grid `(1, rows, columns)` of each piece and the indices of its tokens among the image's, without newlines."""
        grids, start = [], 0
        for piece in self.pieces:
            index = [start + number for number, cell in enumerate(piece.cells()) if cell is not None]
            if index:
                grids.append(((1, piece.rows, piece.columns), index))
            start += piece.tokens
        return grids


Cut = Callable[[Any, int, int, int], Layout]
"""A function of `(processor, width, height, images)` that returns the layout of an image in a prompt with `images` images."""


def cut(box: Box, size: tuple[float, float], start: tuple[float, float], part: dict) -> Box:
    """The crop of `box` that begins at `start` (x, y) and is as large as `part`, both in pixels of `box` drawn in `size`."""
    x, y = (box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1]
    left, top = box[0] + start[0] * x, box[1] + start[1] * y
    return left, top, left + part["width"] * x, top + part["height"] * y


def side_length(value: int | Sequence[int]) -> int:
    """A side length that a config gives as one number, or as one per direction (which must be equal)."""
    return value if isinstance(value, int) else value[0]


def square_patches(vision: Any) -> int:
    """Number of patches per encoder input for this `vision_config`, where all inputs have one size."""
    return (side_length(vision.image_size) // side_length(vision.patch_size)) ** 2


@dataclass(frozen=True)
class ImageSetting:
    """A setting of a processor.

    Attributes:
        tokens: most visual tokens of an image with a usual aspect ratio.
        image_processor: settings of the image processor to change.
        config: entries of config.json that have to change along; of one that is a mapping, its entries.
    """

    tokens: int
    image_processor: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a config.json with this setting."""
        entries = self.config.items()
        return dict(config) | {
            key: {**config[key], **value} if isinstance(value, Mapping) else value for key, value in entries
        }

    def applied(self, processor: Any) -> Any:
        """A copy of the processor with this setting."""
        image_processor = processor.image_processor
        changed = copy.copy(processor)
        changed.image_processor = type(image_processor).from_dict(
            image_processor.to_dict() | dict(self.image_processor)
        )
        return changed


Sizes = Callable[[Any], list[ImageSetting]]
"""A function of a processor that returns its settings, with increasing tokens; the last one is the current setting."""

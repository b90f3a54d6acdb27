"""A scene: a grid of cells holding shapes, handwritten digits, lines of letters, or nothing."""

from dataclasses import dataclass, field
from random import Random

import numpy as np

from . import stamps
from .vocab import (
    BACKGROUND_ID,
    BACKGROUNDS,
    CELL,
    COLOUR_ID,
    COLOURS,
    LETTERS,
    PER_CELL,
    SHAPES,
    THING_ID,
    TOKEN,
)

SMALL, LARGE = (20, 22, 24), (36, 38, 40)


@dataclass(frozen=True)
class Cell:
    """One cell. ``kind`` is shape, digit, text or nothing; offsets are the jitter in pixels."""

    kind: str
    name: str = ""  # shape name, digit, or the letters
    colour: str = ""
    large: bool = False
    size: int = 0
    dx: int = 0
    dy: int = 0
    digit_index: int = -1


@dataclass
class TokenLabels:
    """Labels of the things under each visual token, row-major: arrays of shape (rows, columns) in tokens."""

    thing: np.ndarray
    colour: np.ndarray
    role: np.ndarray
    background: np.ndarray


@dataclass
class Scene:
    """The content of an image. ``cells`` is row-major; ``noise_seed`` fixes the texture."""

    rows: int
    columns: int
    background: str
    cells: list[Cell]
    noise_seed: int
    kind: str = field(default="scene", init=False)

    def at(self, row: int, column: int) -> Cell:
        return self.cells[row * self.columns + column]

    def places(self, **attributes) -> list[tuple[int, int]]:
        """List (row, column), counted from 0, of each cell whose attributes equal ``attributes``."""
        return [
            divmod(i, self.columns)
            for i, cell in enumerate(self.cells)
            if all(getattr(cell, key) == value for key, value in attributes.items())
        ]

    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.rows * CELL, self.columns * CELL

    def draw(self) -> tuple[np.ndarray, TokenLabels]:
        return _draw(self)


def sample_scene(rng: Random, grid: tuple[int, int], split: str) -> Scene:
    """Draw a random scene; a quarter of the scenes have one colour for all shapes."""
    rows, columns = grid
    background = rng.choice(tuple(BACKGROUNDS))
    one_colour = rng.choice(tuple(COLOURS)) if rng.random() < 0.25 else ""
    palette = rng.sample(tuple(COLOURS), rng.choice((2, 3, 4, 6)))
    fill = rng.choice((0.75, 0.85, 0.95))
    cells = [_sample_cell(rng, split, one_colour, palette, fill) for _ in range(rows * columns)]
    return Scene(rows, columns, background, cells, rng.randrange(1 << 30))


def _sample_cell(rng: Random, split: str, one_colour: str, palette: list[str], fill: float) -> Cell:
    if rng.random() > fill:
        return Cell("nothing")
    u = rng.random()
    if u < 0.66:
        large = rng.random() < 0.5
        size = rng.choice(LARGE if large else SMALL)
        jitter = 3 if large else 6
        return Cell(
            "shape", rng.choice(SHAPES), one_colour or rng.choice(palette), large, size,
            rng.randint(-jitter, jitter), rng.randint(-jitter, jitter),
        )  # fmt: skip
    return sample_digit(rng, split) if u < 0.87 else sample_text(rng)


def sample_digit(rng: Random, split: str) -> Cell:
    """Draw a random digit, handwritten by somebody of the split."""
    digit = rng.randrange(10)
    index = rng.choice(stamps.digit_pool(split)[digit])
    return Cell(
        "digit", str(digit), size=rng.choice((34, 36, 38)), dx=rng.randint(-3, 3), dy=rng.randint(-3, 3),
        digit_index=index, large=True,
    )  # fmt: skip


def sample_text(rng: Random, letters: int = 3) -> Cell:
    """Draw different random letters, at most three, from the left."""
    return Cell("text", "".join(rng.sample(LETTERS, letters)), dx=rng.randint(-2, 0), dy=rng.randint(-3, 3))


def paint(canvas: np.ndarray, alpha: np.ndarray, colour: tuple[int, int, int], top: int, left: int) -> None:
    """Blend a colour into the canvas through an alpha mask."""
    region = canvas[top : top + alpha.shape[0], left : left + alpha.shape[1]]
    a = alpha[: region.shape[0], : region.shape[1], None].astype(np.int32)
    region[:] = (region * (255 - a) + np.asarray(colour, dtype=np.int32) * a) // 255


def textured(background: str, height: int, width: int, noise: np.random.RandomState) -> np.ndarray:
    """A tinted background with faint blocks of 12x12 pixels and a few specks."""
    base = np.asarray(BACKGROUNDS[background]) + noise.randint(-6, 7, size=3)
    blocks = noise.randint(-1, 2, size=(height // 12, width // 12)) * 4
    texture = np.repeat(np.repeat(blocks, 12, axis=0), 12, axis=1)
    canvas = np.clip(base[None, None, :] + texture[:, :, None], 0, 255).astype(np.int32)
    specks = noise.randint(0, height * width, size=16)
    canvas.reshape(-1, 3)[specks] = np.clip(base + 24, 0, 255)
    return canvas


def ink(background: str) -> tuple[int, int, int]:
    """The colour of lines, digits and letters, which stands out from the background."""
    return (225, 225, 225) if background == "black" else (20, 20, 20)


def draw_rulers(canvas: np.ndarray, rows: int, columns: int, line: tuple[int, int, int]) -> None:
    """Draw grid lines, a frame, and ticks: row r has r+1 ticks on its left edges, column c has c+1 on its top edges."""
    height, width = canvas.shape[:2]
    for r in range(rows):
        canvas[r * CELL, :] = line
    for c in range(columns):
        canvas[:, c * CELL] = line
    canvas[-2:, :] = canvas[:, -2:] = line
    for r in range(rows):
        for c in range(columns):
            y, x = r * CELL, c * CELL
            for k in range(r + 1):
                canvas[y + 6 + 5 * k : y + 8 + 5 * k, x + 1 : x + 4] = line
            for k in range(c + 1):
                canvas[y + 1 : y + 4, x + 6 + 5 * k : x + 8 + 5 * k] = line


def stamp(cell: Cell) -> np.ndarray:
    """The alpha mask of a shape or a digit, a square of `cell.size` pixels."""
    if cell.kind == "shape":
        return stamps.shape(cell.name, cell.size)
    return stamps.handwritten(cell.digit_index, cell.size)


def stamp_corner(scene: Scene, row: int, column: int) -> tuple[int, int]:
    """Top and left of a cell's stamp in the image."""
    cell = scene.at(row, column)
    return row * CELL + (CELL - cell.size) // 2 + cell.dy, column * CELL + (CELL - cell.size) // 2 + cell.dx


def _draw(scene: Scene) -> tuple[np.ndarray, TokenLabels]:
    height, width = scene.size()
    noise = np.random.RandomState(scene.noise_seed)
    canvas = textured(scene.background, height, width, noise)
    line = ink(scene.background)
    draw_rulers(canvas, scene.rows, scene.columns, line)
    cover = np.zeros((height, width), dtype=np.uint8)
    token_rows, token_columns = height // TOKEN, width // TOKEN
    thing = np.zeros((token_rows, token_columns), dtype=np.int64)
    colour, role = np.zeros_like(thing), np.zeros_like(thing)
    for i, cell in enumerate(scene.cells):
        r, c = divmod(i, scene.columns)
        y, x = r * CELL, c * CELL
        block = (slice(r * PER_CELL, (r + 1) * PER_CELL), slice(c * PER_CELL, (c + 1) * PER_CELL))
        if cell.kind in ("shape", "digit"):
            mask = stamp(cell)
            top, left = stamp_corner(scene, r, c)
            tint = _tint(COLOURS[cell.colour], noise) if cell.kind == "shape" else line
            paint(canvas, mask, tint, top, left)
            cover[top : top + cell.size, left : left + cell.size] = mask
            thing[block] = THING_ID[cell.name if cell.kind == "shape" else f"digit {cell.name}"]
            colour[block] = COLOUR_ID.get(cell.colour, 0)
        elif cell.kind == "text":
            for k, char in enumerate(cell.name):
                mask = stamps.letter(char)
                top = y + CELL // 2 - mask.shape[0] // 2 + cell.dy
                left = x + k * TOKEN + TOKEN // 2 - mask.shape[1] // 2 + cell.dx
                paint(canvas, mask, line, top, left)
                cover[top : top + mask.shape[0], left : left + mask.shape[1]] = mask
                thing[block[0], c * PER_CELL + k] = THING_ID[f"letter {char}"]
    share = cover.reshape(token_rows, TOKEN, token_columns, TOKEN).mean(axis=(1, 3))
    covered = share > 16
    centre = np.zeros_like(covered)
    centre[1::PER_CELL, 1::PER_CELL] = True
    for i, cell in enumerate(scene.cells):
        r, c = divmod(i, scene.columns)
        spot = (r * PER_CELL + 1, c * PER_CELL + 1)
        if cell.kind == "text":
            role[spot[0], c * PER_CELL : (c + 1) * PER_CELL] = 3
        elif cell.kind != "nothing":
            role[spot] = 3 if cell.large else 2
    keep = covered | (role > 0)
    role = np.where(keep & (role == 0), 1, role)
    labels = TokenLabels(
        np.where(keep, thing, 0), np.where(keep, colour, 0), role,
        np.full_like(thing, BACKGROUND_ID[scene.background]),
    )  # fmt: skip
    return canvas.astype(np.uint8), labels


def _tint(base: tuple[int, int, int], noise: np.random.RandomState) -> tuple[int, int, int]:
    """A colour with a little variation of its own."""
    return tuple(int(v) for v in np.clip(np.asarray(base) + noise.randint(-14, 15, size=3), 0, 255))

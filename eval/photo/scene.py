"""A scene: pictures at places of a grid, on a plain, textured or photographic background; 224 x 224 pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageOps

from .pictures import BACKGROUND, Album
from .vocab import CORNERS, PLACES, alike

PIXELS, PATCH = 224, 14
SIDE = PIXELS // PATCH
COVERED = 0.1  # share of a patch above which something is on it
GROUNDS = ("plain", "texture", "photo")
GRIDS = {1: 0.2, 2: 0.4, 3: 0.4}  # cells a side, and how often
LARGEST = {1: 222, 2: 112, 3: 75}  # pixels of a picture's longer side


@dataclass(frozen=True)
class Item:
    """A picture in a scene: where its box is, in pixels, and whether it is mirrored."""

    name: str
    picture: int
    cell: tuple[int, int]
    left: int
    top: int
    width: int
    height: int
    mirrored: bool


@dataclass
class Drawn:
    """An image [224, 224, 3] and, for each patch [16, 16], the share that is covered and the number of the item, or -1."""

    pixels: np.ndarray
    cover: np.ndarray
    item: np.ndarray

    def background(self) -> float:
        """The share of patches that show background alone."""
        return float((self.cover < COVERED).mean())


@dataclass
class Scene:
    """What is in an image. `seed` fixes the background."""

    cells: int  # a side
    ground: str
    items: list[Item]
    seed: int
    split: str

    def at(self, row: int, column: int) -> Item | None:
        return next((item for item in self.items if item.cell == (row, column)), None)

    def place(self, item: Item) -> str:
        """The words for where an item is; a scene of one cell has none."""
        row, column = item.cell
        return (CORNERS if self.cells == 2 else PLACES)[row * self.cells + column]

    def named(self, name: str) -> list[Item]:
        return [item for item in self.items if item.name == name]

    def draw(self, album: Album) -> Drawn:
        canvas = _ground(self, album)
        for item in self.items:
            image = self._image(item, album)
            canvas.paste(image, (item.left, item.top), image)
        return Drawn(np.asarray(canvas), *self.covered(album))

    def covered(self, album: Album) -> tuple[np.ndarray, np.ndarray]:
        """Of each patch [16, 16] the share that is covered, and the number of the item there, or -1."""
        alphas = np.zeros((1 + len(self.items), SIDE, SIDE))  # the first is that of no item
        for number, item in enumerate(self.items, 1):
            mask = Image.new("L", (PIXELS, PIXELS))
            mask.paste(self._image(item, album).getchannel("A"), (item.left, item.top))
            alphas[number] = np.asarray(mask, dtype=np.float32).reshape(SIDE, PATCH, SIDE, PATCH).mean((1, 3)) / 255
        cover = alphas.sum(0).clip(0, 1)
        return cover, np.where(cover >= COVERED, alphas.argmax(0) - 1, -1)

    def _image(self, item: Item, album: Album) -> Image.Image:
        image = album.image(item.picture).resize((item.width, item.height), Image.Resampling.BICUBIC)
        return ImageOps.mirror(image) if item.mirrored else image


def sample_scene(rng: Random, split: str, album: Album, grounds: Sequence[str] = GROUNDS) -> Scene:
    """Draw a random scene of one to six pictures of a split on one of `grounds`. In half of those with more than one, a name
    comes up again."""
    cells = rng.choices(list(GRIDS), list(GRIDS.values()))[0]
    full = rng.random() < 0.5  # large pictures, and many: little background
    number = {1: 1, 2: rng.randint(3 if full else 1, 4), 3: rng.randint(5 if full else 2, 6)}[cells]
    names: list[str] = []
    again = rng.randint(2, min(4, number)) if number > 1 and rng.random() < 0.5 else 1
    while len(names) < number:
        name = rng.choice(album.names)
        if not any(alike(name, other) for other in names):
            names += [name] * (again if not names else 1)
    names = names[:number]
    rng.shuffle(names)
    places = rng.sample([(row, column) for row in range(cells) for column in range(cells)], number)
    items = [_item(rng, split, album, name, cell, cells, full) for name, cell in zip(names, places, strict=True)]
    return Scene(cells, rng.choice(grounds), items, rng.randrange(1 << 30), split)


def _item(rng: Random, split: str, album: Album, name: str, cell: tuple[int, int], cells: int, full: bool) -> Item:
    picture = rng.choice(album.numbers(split, name))
    width, height = album.image(picture).size
    longest = LARGEST[cells] * rng.uniform(0.8 if full else 0.5, 1.0)
    scale = longest / max(width, height)
    width, height = max(8, round(width * scale)), max(8, round(height * scale))
    room = PIXELS / cells
    row, column = cell
    left = round(column * room + rng.uniform(0, room - width))
    top = round(row * room + rng.uniform(0, room - height))
    return Item(name, picture, cell, left, top, width, height, rng.random() < 0.5)


def _ground(scene: Scene, album: Album) -> Image.Image:
    noise = np.random.RandomState(scene.seed)
    if scene.ground == "photo":
        photo = album.image(noise.choice(album.numbers(scene.split, BACKGROUND))).convert("RGB")
        side = int(min(photo.size) * noise.uniform(0.5, 1.0))
        left, top = (noise.randint(0, length - side + 1) for length in photo.size)
        box = (left, top, left + side, top + side)
        return photo.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC, box)
    colour = noise.randint(40, 256, size=3)
    canvas = np.broadcast_to(colour, (PIXELS, PIXELS, 3)).astype(np.float32)
    if scene.ground == "texture":
        canvas = canvas + _texture(noise)
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


def _texture(noise: np.random.RandomState) -> np.ndarray:
    """A slope, waves and a grain of random strength, [224, 224, 3], in levels of a pixel."""
    y, x = np.mgrid[0:PIXELS, 0:PIXELS] / PIXELS - 0.5
    angle, strength = noise.uniform(0, 2 * np.pi, size=2), noise.uniform(10, 60, size=2)
    slope = (np.cos(angle[0]) * x + np.sin(angle[0]) * y) * strength[0] * 2
    waves = np.sin((np.cos(angle[1]) * x + np.sin(angle[1]) * y) * noise.uniform(20, 90)) * strength[1] / 3
    coarse = Image.fromarray(noise.normal(0, 1, size=(28, 28)).astype(np.float32))
    grain = np.asarray(coarse.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)) * noise.uniform(2, 14)
    return (slope + waves + grain)[..., None] * noise.uniform(0.5, 1.2, size=3)

"""A drawn bar chart on the default canvas: three or four bars of different colours, heights 1 to 5."""

from dataclasses import dataclass, field
from random import Random

import numpy as np

from .scene import TokenLabels, _tint, ink, textured
from .vocab import BACKGROUND_ID, BACKGROUNDS, BAR_LEVELS, CELL, COLOUR_ID, COLOURS, THING_ID, TOKEN

SIDE = 3 * CELL
BASE, UNIT, BAR_WIDTH = 128, 24, 24


@dataclass
class Chart:
    """Bars from left to right: (colour, height in levels)."""

    background: str
    bars: list[tuple[str, int]]
    noise_seed: int
    kind: str = field(default="chart", init=False)

    def draw(self) -> tuple[np.ndarray, TokenLabels]:
        return _draw(self)


def sample_chart(rng: Random) -> Chart:
    """A random chart in which all heights differ."""
    count = rng.choice((3, 4))
    colours = rng.sample(tuple(COLOURS), count)
    heights = rng.sample(range(1, BAR_LEVELS + 1), count)
    return Chart(rng.choice(tuple(BACKGROUNDS)), list(zip(colours, heights, strict=True)), rng.randrange(1 << 30))


def _draw(chart: Chart) -> tuple[np.ndarray, TokenLabels]:
    noise = np.random.RandomState(chart.noise_seed)
    canvas = textured(chart.background, SIDE, SIDE, noise)
    line = ink(chart.background)
    for level in range(1, BAR_LEVELS + 1):
        y = BASE - level * UNIT
        canvas[y, 8::3] = line
        for k in range(level):  # level v has v ticks at the left
            canvas[y + 3 + 4 * k : y + 5 + 4 * k, 2:6] = line
    canvas[BASE : BASE + 2, 8:] = line
    canvas[:, 8:10] = line
    tokens = SIDE // TOKEN
    thing = np.zeros((tokens, tokens), dtype=np.int64)
    colour, role = np.zeros_like(thing), np.zeros_like(thing)
    for k, (name, height) in enumerate(chart.bars):
        left, top = 18 + 32 * k, BASE - height * UNIT
        canvas[top:BASE, left : left + BAR_WIDTH] = _tint(COLOURS[name], noise)
        columns = slice(left // TOKEN, (left + BAR_WIDTH - 3) // TOKEN + 1)
        rows = slice(top // TOKEN, BASE // TOKEN)
        thing[rows, columns], colour[rows, columns], role[rows, columns] = THING_ID["bar"], COLOUR_ID[name], 1
        thing[top // TOKEN, columns] = THING_ID[f"bar top {height}"]
        role[top // TOKEN, left // TOKEN] = 3
    background = np.full_like(thing, BACKGROUND_ID[chart.background])
    return canvas.astype(np.uint8), TokenLabels(thing, colour, role, background)

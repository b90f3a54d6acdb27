"""Names and constants of the world. Everything that can be said or seen is listed here."""

CELL = 48  # pixels per grid cell
TOKEN = 16  # pixels per visual token: a cell is 3x3 tokens
PER_CELL = CELL // TOKEN

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = {
    "red": (214, 40, 40),
    "green": (44, 160, 60),
    "blue": (40, 84, 214),
    "yellow": (238, 204, 30),
    "purple": (146, 54, 176),
    "orange": (242, 132, 24),
}
BACKGROUNDS = {"white": (240, 240, 238), "gray": (150, 152, 154), "black": (30, 30, 34), "pink": (244, 190, 206)}
DIGITS = tuple(str(d) for d in range(10))
LETTERS = tuple("ACEFHKLMPRTVXZ")

BAR_LEVELS = 5
# What a visual token can lie on ("thing"). The order is the label id used by the trainer.
THINGS = (
    ("nothing",)
    + SHAPES
    + tuple(f"digit {d}" for d in DIGITS)
    + tuple(f"letter {c}" for c in LETTERS)
    + ("bar",)
    + tuple(f"bar top {v}" for v in range(1, BAR_LEVELS + 1))
)
THING_ID = {name: i for i, name in enumerate(THINGS)}
COLOUR_ID = {name: i + 1 for i, name in enumerate(COLOURS)}  # 0: no colour
BACKGROUND_ID = {name: i for i, name in enumerate(BACKGROUNDS)}
ROLES = ("background", "part", "centre of a small object", "centre of a large object")

FAMILIES = (
    "colour_at",
    "object_at",
    "count",
    "locate",
    "read",
    "compare",
    "scene",
    "chart",
    "two_images",
    "text",
)
SCENE_FAMILIES = ("colour_at", "object_at", "count", "locate", "read", "compare", "scene")

DEFAULT_GRID = (3, 3)
QWEN_GRIDS = ((3, 3), (2, 3), (3, 2), (2, 4), (4, 2), (3, 4), (4, 3), (4, 4))

# Split -> (seed base, first and last position in the shuffled handwritten digits).
SPLITS = {
    "train": (10_000_000, 0, 1100),
    "calibration": (1_000_000, 1100, 1200),
    "validation": (2_000_000, 1200, 1400),
    "test": (3_000_000, 1400, 1797),
}

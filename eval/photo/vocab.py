"""Words of the scenes: plurals, articles, places, and names that must not meet in one scene."""

CORNERS = ("top left", "top right", "bottom left", "bottom right")
PLACES = (
    "top left", "top", "top right",
    "left", "centre", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
SIDES = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}  # row and column steps
FAMILIES = ("name", "choose", "place", "where", "count", "exists", "larger", "beside")
# One name could be said of a picture of another: a duck is a bird, too.
ALIKE = (
    ("bird", "chick", "chicken", "penguin"),
    ("tree", "leaf", "flower"),
    ("glass", "cup"),
    ("car", "truck", "bus"),
    ("house", "castle", "tent"),
    ("sheep", "deer", "cow"),
    ("cake", "pizza", "muffin"),
    ("ball", "globe", "moon", "sun", "star"),
    ("lemon", "orange", "pear", "apple"),
    ("box", "mailbox"),
)
_PLURALS = {"deer": "deer", "fish": "fish", "sheep": "sheep", "leaf": "leaves"}
_PAIRS = ("glasses", "grapes")  # plural as they are


def plural(name: str) -> str:
    if name in _PAIRS:
        return name
    if name in _PLURALS:
        return _PLURALS[name]
    if name.endswith(("s", "x", "ch", "sh")):
        return name + "es"
    if name.endswith("y"):
        return name[:-1] + "ies"
    return name + "s"


def one(name: str) -> str:
    """The name after its article."""
    if name in _PAIRS:
        return name
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def alike(first: str, second: str) -> bool:
    return first == second or any(first in group and second in group for group in ALIKE)

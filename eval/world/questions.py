"""Question families about one image or two.

Each asker returns (question, answer), or None where the image has no such question.

Answers are balanced where they can be: a count is first drawn among the counts that occur, yes and no are tried at random.
"""

from collections.abc import Callable, Sequence
from random import Random

from .chart import Chart
from .scene import Scene
from .vocab import COLOURS, DIGITS, SHAPES

Asked = tuple[str, str] | None
ORDINALS = ("first", "second")
MAX_COUNT = 5


def place(row: int, column: int) -> str:
    """Name a place, counted from 1."""
    return f"row {row + 1} column {column + 1}"


def thing_at(scene: Scene, row: int, column: int) -> str:
    """Name the thing at a place: a shape's name, digit, text, or nothing."""
    cell = scene.at(row, column)
    return cell.name if cell.kind == "shape" else cell.kind


def colour_at(rng: Random, scene: Scene) -> Asked:
    places = scene.places(kind="shape")
    if not places:
        return None
    row, column = rng.choice(places)
    form = rng.choice(("What colour is the shape at {}?", "Which colour is at {}?"))
    return form.format(place(row, column)), scene.at(row, column).colour


def object_at(rng: Random, scene: Scene) -> Asked:
    row, column = rng.randrange(scene.rows), rng.randrange(scene.columns)
    form = rng.choice(("What is at {}?", "What object is at {}?"))
    return form.format(place(row, column)), thing_at(scene, row, column)


def count(rng: Random, scene: Scene) -> Asked:
    tallies = {f"{name}s" if name != "cross" else "crosses": len(scene.places(name=name)) for name in SHAPES}
    tallies |= {f"{colour} shapes": len(scene.places(colour=colour)) for colour in COLOURS}
    tallies["digits"] = len(scene.places(kind="digit"))
    count = rng.choice(sorted({n for n in tallies.values() if n <= MAX_COUNT}))
    what = rng.choice([name for name, n in tallies.items() if n == count])
    return f"How many {what} are there?", str(count)


def _unique(scene: Scene, kind: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if len(scene.places(kind=kind, name=name)) == 1]


def locate(rng: Random, scene: Scene) -> Asked:
    unique = [(name, "shape") for name in _unique(scene, "shape", SHAPES)]
    unique += [(name, "digit") for name in _unique(scene, "digit", DIGITS)]
    if not unique:
        return None
    name, kind = rng.choice(unique)
    return f"Where is the {name}?", place(*scene.places(kind=kind, name=name)[0])


def read(rng: Random, scene: Scene) -> Asked:
    texts, digits = scene.places(kind="text"), scene.places(kind="digit")
    if texts and (not digits or rng.random() < 0.6):
        row, column = rng.choice(texts)
        return f"Read the text at {place(row, column)}.", " ".join(scene.at(row, column).name)
    if digits:
        row, column = rng.choice(digits)
        return f"Which digit is at {place(row, column)}?", scene.at(row, column).name
    return None


def compare(rng: Random, scene: Scene) -> Asked:
    if rng.random() < 0.5:
        single = {name: scene.at(*scene.places(name=name)[0]) for name in _unique(scene, "shape", SHAPES)}
        pairs = [(a, b) for a in single for b in single if single[a].large != single[b].large]
        if pairs:
            a, b = rng.choice(pairs)
            return f"Which is larger, the {a} or the {b}?", a if single[a].large else b
    tallies = {colour: len(scene.places(colour=colour)) for colour in COLOURS}
    pairs = [(a, b) for a in COLOURS for b in COLOURS if tallies[a] != tallies[b] and min(tallies[a], tallies[b]) > 0]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    return f"Are there more {a} or {b} shapes?", a if tallies[a] > tallies[b] else b


def scene_wide(rng: Random, scene: Scene) -> Asked:
    u = rng.random()
    if u < 0.35:
        return "What is the background colour?", scene.background
    shapes = scene.places(kind="shape")
    if u < 0.65 and len(shapes) > 1:
        same = len({scene.at(*spot).colour for spot in shapes}) == 1
        return "Do all shapes have the same colour?", "yes" if same else "no"
    answer = rng.choice(("yes", "no"))
    names = [name for name in SHAPES if bool(scene.places(name=name)) == (answer == "yes")]
    return (f"Is there a {rng.choice(names)}?", answer) if names else None


def chart(rng: Random, drawn: Chart) -> Asked:
    u = rng.random()
    if u < 0.5:
        colour, height = rng.choice(drawn.bars)
        return f"How tall is the {colour} bar?", str(height)
    if u < 0.8:
        return "Which bar is the tallest?", max(drawn.bars, key=lambda bar: bar[1])[0]
    return "Which bar is the shortest?", min(drawn.bars, key=lambda bar: bar[1])[0]


def two_images(rng: Random, pair: tuple[Scene, Scene]) -> Asked:
    u = rng.random()
    if u < 0.4:
        present = [{name for name in SHAPES if scene.places(name=name)} for scene in pair]
        only = sorted(present[0] ^ present[1])
        if only:
            name = rng.choice(only)
            return f"Which image has a {name}?", ORDINALS[0 if name in present[0] else 1]
    if u < 0.6:
        same = pair[0].background == pair[1].background
        return "Do both images have the same background colour?", "yes" if same else "no"
    which = rng.randrange(2)
    scene = pair[which]
    row, column = rng.randrange(scene.rows), rng.randrange(scene.columns)
    return f"What is at {place(row, column)} of the {ORDINALS[which]} image?", thing_at(scene, row, column)


ASKERS: dict[str, Callable[..., Asked]] = {
    "colour_at": colour_at,
    "object_at": object_at,
    "count": count,
    "locate": locate,
    "read": read,
    "compare": compare,
    "scene": scene_wide,
    "chart": chart,
    "two_images": two_images,
}

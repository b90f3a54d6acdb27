"""Questions about a scene, each with one right answer."""

from collections.abc import Callable
from random import Random

from .scene import Scene
from .vocab import SIDES, alike, one, plural

Turn = tuple[str, str]  # question and answer
LARGER = 1.7  # a thing is called larger where its box is that much larger


def ask(rng: Random, scene: Scene, family: str, names: list[str]) -> Turn | None:
    """A question of a family, or None where the scene allows none; `names`: all that there are."""
    return _ASK[family](rng, scene, names)


def ask_several(rng: Random, scene: Scene, family: str, names: list[str], number: int) -> list[Turn]:
    """Up to `number` different questions of a family."""
    turns: dict[str, str] = {}
    for _ in range(3 * number):
        turn = ask(rng, scene, family, names)
        if turn and len(turns) < number:
            turns.setdefault(*turn)
    return list(turns.items())


def _name(rng: Random, scene: Scene, names: list[str]) -> Turn | None:
    return ("What is this?", scene.items[0].name) if len(scene.items) == 1 else None


def _choose(rng: Random, scene: Scene, names: list[str]) -> Turn | None:
    if len(scene.items) != 1:
        return None
    name = scene.items[0].name
    return f"Is this {_options(rng, [name], names, 4)}?", name


def _options(rng: Random, options: list[str], names: list[str], least: int) -> str:
    """The words that offer the names of `options`, and others that are not like them up to `least`."""
    options = list(options)
    while len(options) < least:
        other = rng.choice(names)
        if not any(alike(other, option) for option in options):
            options.append(other)
    rng.shuffle(options)
    return f"{', '.join(map(one, options[:-1]))} or {one(options[-1])}"


def _there(rng: Random, scene: Scene, name: str) -> list[str]:
    """A name and up to three others of the scene."""
    others = sorted({item.name for item in scene.items} - {name})
    return [name, *rng.sample(others, min(3, len(others)))]


def _place(rng: Random, scene: Scene, names: list[str]) -> Turn | None:
    if scene.cells == 1:
        return None
    item = rng.choice(scene.items)
    return f"What is at the {scene.place(item)}, {_options(rng, _there(rng, scene, item.name), names, 3)}?", item.name


def _where(rng: Random, scene: Scene, names: list[str]) -> Turn | None:
    item = rng.choice(scene.items)
    if scene.cells == 1 or len(scene.named(item.name)) > 1:
        return None
    return f"Where is the {item.name}?", scene.place(item)


def _count(rng: Random, scene: Scene, names: list[str]) -> Turn | None:
    if len(scene.items) == 1:
        return None
    name = rng.choice(sorted({item.name for item in scene.items}))
    return f"How many {plural(name)} are there?", str(len(scene.named(name)))


def _exists(rng: Random, scene: Scene, names: list[str]) -> Turn | None:
    if rng.random() < 0.5:
        name = rng.choice(scene.items).name
        return f"Is there {one(name)}?", "yes"
    absent = [name for name in names if not any(alike(name, item.name) for item in scene.items)]
    return f"Is there {one(rng.choice(absent))}?", "no"


def _larger(rng: Random, scene: Scene, names: list[str]) -> Turn | None:
    single = [item for item in scene.items if len(scene.named(item.name)) == 1]
    if len(single) < 2:
        return None
    first, second = rng.sample(single, 2)
    areas = [item.width * item.height for item in (first, second)]
    if max(areas) < LARGER * min(areas):
        return None
    return f"Which is larger, the {first.name} or the {second.name}?", (first, second)[areas[1] > areas[0]].name


def _next_to(rng: Random, scene: Scene, names: list[str]) -> Turn | None:
    """Asks for the next thing in a row or column, where there is just one on that side."""
    item = rng.choice(scene.items)
    side, (down, across) = rng.choice(list(SIDES.items()))
    if len(scene.named(item.name)) > 1:
        return None
    row, column = item.cell
    there = [scene.at(row + down * k, column + across * k) for k in range(1, scene.cells)]
    neighbours = [other.name for other in there if other]
    if len(neighbours) != 1:
        return None
    offered = [name for name in _there(rng, scene, neighbours[0]) if name != item.name]
    return f"What is {side} the {item.name}, {_options(rng, offered, names, 2)}?", neighbours[0]


_ASK: dict[str, Callable[[Random, Scene, list[str]], Turn | None]] = {
    "name": _name, "choose": _choose, "place": _place, "where": _where,
    "count": _count, "exists": _exists, "larger": _larger, "beside": _next_to,
}  # fmt: skip

"""The text-only family: small sums, sorting, reversing, comparing, and recalling what the prompt says."""

from random import Random

from .vocab import COLOURS, LETTERS

OWNERS = ("box", "cup", "car", "door", "hat")


def ask_text(rng: Random) -> tuple[str, str]:
    """One text-only question with its answer."""
    return rng.choice((_sum, _larger, _sort, _reverse, _copy, _recall))(rng)


def _sum(rng: Random) -> tuple[str, str]:
    a, b = rng.randrange(10), rng.randrange(10)
    return f"What is {a} plus {b}?", str(a + b)


def _larger(rng: Random) -> tuple[str, str]:
    a, b = rng.sample(range(20), 2)
    return f"Which is larger, {a} or {b}?", str(max(a, b))


def _sort(rng: Random) -> tuple[str, str]:
    numbers = rng.sample(range(10), 3)
    return "Sort {} {} {}.".format(*numbers), " ".join(map(str, sorted(numbers)))


def _reverse(rng: Random) -> tuple[str, str]:
    letters = rng.sample(LETTERS, 3)
    return f"Reverse {' '.join(letters)}.", " ".join(reversed(letters))


def _copy(rng: Random) -> tuple[str, str]:
    letters = rng.sample(LETTERS, rng.choice((3, 4)))
    return f"Copy {' '.join(letters)}.", " ".join(letters)


def _recall(rng: Random) -> tuple[str, str]:
    owners = rng.sample(OWNERS, 3)
    colours = rng.sample(tuple(COLOURS), 3)
    facts = " ".join(f"The {owner} is {colour}." for owner, colour in zip(owners, colours, strict=True))
    k = rng.randrange(3)
    return f"{facts} What colour is the {owners[k]}?", colours[k]

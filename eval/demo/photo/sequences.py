"""Training sequences: an image's visual tokens once, and many questions about it that do not see each other.

As in demo-smol (`eval/demo/smol/sequences.py`): each question is masked from the others, and its positions go on from
the image, so one forward pass computes what asking them one after another would. Where tokens are left out, those
that stay keep their positions, and what follows stands where it would stand after the whole image.
"""

from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from eval.photo.questions import ask_several
from eval.photo.scene import Scene
from eval.photo.vocab import FAMILIES

from .language import FORM

QUESTIONS = 24  # about an image


@dataclass
class Sequence:
    """One image's tokens and questions; `image` marks where visual tokens go."""

    ids: Tensor  # (length)
    labels: Tensor  # (length): -100 where nothing is learned
    turns: Tensor  # (length): number of the question, 0 in what all of them see
    positions: Tensor  # (length)
    image: slice
    kept: Tensor  # numbers of the visual tokens that are there
    families: list[str]  # of the questions

    def mask(self) -> Tensor:
        """(1, 1, length, length), added to scores: 0 where a token sees another, else -inf."""
        length = len(self.ids)
        same = (self.turns[:, None] == self.turns[None]) | (self.turns == 0)[None]
        visible = same & torch.ones(length, length, dtype=torch.bool).tril()
        return torch.zeros(length, length).masked_fill_(~visible, -torch.inf)[None, None]


class Writer:
    """Turns scenes and questions into sequences."""

    def __init__(self, tokenizer, tokens: int):
        self.encode = lru_cache(maxsize=200_000)(lambda text: tuple(tokenizer(text)["input_ids"]))
        self.tokens = tokens  # visual ones, of an image

    def write(self, turns: list[tuple[str, str, str]], kept: list[int] | None = None) -> Sequence:
        """The sequence of an image with (family, question, answer); `kept`: the visual tokens that stay, all by default."""
        kept = list(range(self.tokens)) if kept is None else kept
        before = self.encode(FORM.before)
        start = len(before)
        ids, positions = [*before, *[0] * len(kept)], [*range(start), *(start + k for k in kept)]
        labels, numbers = [-100] * len(ids), [0] * len(ids)
        after = start + self.tokens
        for number, (_, question, answer) in enumerate(turns, 1):
            head = self.encode(FORM.image[1] + question + FORM.between)
            tail = self.encode(FORM.answer_prefix + answer + FORM.stop)
            ids += [*head, *tail]
            labels += [*[-100] * len(head), *tail]
            numbers += [number] * (len(head) + len(tail))
            positions += range(after, after + len(head) + len(tail))
        image = slice(start, start + len(kept))
        columns = (torch.tensor(column) for column in (ids, labels, numbers, positions))
        return Sequence(*columns, image, torch.tensor(kept), [family for family, _, _ in turns])


def some_turns(random: Random, scene: Scene, names: list[str], weights: dict[str, float]) -> list[tuple[str, str, str]]:
    """Up to `QUESTIONS` questions about a scene, of its families in proportion to `weights`."""
    total = sum(weights.values())
    turns = []
    for family in FAMILIES:
        number = max(1, round(QUESTIONS * 1.6 * weights[family] / total))
        turns += [(family, *turn) for turn in ask_several(random, scene, family, names, number)]
    random.shuffle(turns)
    return turns[:QUESTIONS]


def gaps(random: Random, tokens: int) -> list[int] | None:
    """The tokens that stay where some are left out at random: none are in a fifth of cases, else 10 to 90%."""
    if random.random() < 0.2:
        return None
    return sorted(random.sample(range(tokens), round(tokens * random.uniform(0.1, 0.9))))


def few(random: Random, items: list[int]) -> list[int]:
    """One to all tokens at random, small numbers as often as large ones, and of each thing at least one.

    A language model that learns to look for a token learns it much sooner among few. `items`: what is on each patch, or -1.
    """
    order = random.sample(range(len(items)), len(items))
    first = {items[k]: k for k in order if items[k] >= 0}
    number = round(len(items) ** random.uniform(0, 1))
    return sorted({*first.values(), *order[:number]})

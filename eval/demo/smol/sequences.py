"""Training batches: an image once, as the words that the tower writes of it, and many questions that do not see each other.

A question that is asked alone reads the image's tokens and itself. So one forward pass over

    <|im_start|>user\n row 1 column 1 : large red ...    question 1 ... answer 1 <|im_end|>    question 2 ... answer 2 ...

with a mask that shows each question the image and itself, and with positions that go on from the image for each, computes
exactly what asking them one after another does, for a third of the tokens.
"""

from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from eval.demo.sequences import turns_about
from eval.world.rows import View, asked_views, images_of, sample_view
from eval.world.textual import ask_text
from eval.world.vocab import FAMILIES, SCENE_FAMILIES

from .table import token_ids, written

BEFORE, BETWEEN, STOP = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
GRID = (3, 3)
TEXTS = 16  # questions without an image in a batch
Asked = list[tuple[str, str]]  # questions and answers


@dataclass
class Batch:
    """Sequences padded on the right."""

    ids: Tensor  # (batch, length)
    labels: Tensor  # (batch, length): -100 where nothing is learned
    turns: Tensor  # (batch, length): number of the question, 0 in the prefix, -1 in the padding
    positions: Tensor  # (batch, length)
    families: list[list[str]]  # of each sequence's questions

    def mask(self) -> Tensor:
        """(batch, 1, length, length), added to scores: 0 where a token sees another, else -inf; padding sees itself."""
        length = self.ids.shape[1]
        same_turn = self.turns[:, :, None] == self.turns[:, None, :]
        visible = (same_turn | (self.turns[:, None, :] == 0)) & torch.ones(length, length, dtype=torch.bool).tril()
        visible |= torch.eye(length, dtype=torch.bool)
        return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]


class Writer:
    """Turns views and questions into batches."""

    def __init__(self, tokenizer):
        self.encode = lru_cache(maxsize=200_000)(lambda text: tuple(tokenizer(text)["input_ids"]))
        self.pad_id = tokenizer.pad_token_id

    def write(self, view: View | None, questions: Asked) -> list[list[int]]:
        """Return ids, labels, turns and positions of one sequence."""
        ids = [*self.encode(BEFORE)]
        for image in images_of(view):
            ids += token_ids(written(image), self.encode)
        start = len(ids)
        labels, turns, positions = [-100] * start, [0] * start, list(range(start))
        for number, (question, answer) in enumerate(questions, 1):
            before, after = self.encode(question + BETWEEN), self.encode(answer + STOP)
            ids += [*before, *after]
            labels += [*[-100] * len(before), *after]
            turns += [number] * (len(before) + len(after))
            positions += range(start, start + len(before) + len(after))
        return [ids, labels, turns, positions]

    def batch(self, views: list[View | None], questions: list[Asked], families: list[list[str]]) -> Batch:
        """Collate one sequence per view."""
        rows = [self.write(view, turns) for view, turns in zip(views, questions, strict=True)]
        length = max(len(row[0]) for row in rows)
        padding = (self.pad_id, -100, -1, 0)
        columns = [
            torch.tensor([row[k] + [fill] * (length - len(row[k])) for row in rows]) for k, fill in enumerate(padding)
        ]
        return Batch(*columns, families)


def training_batch(writer: Writer, random: Random, weights: dict[str, float]) -> Batch:
    """Draw a fresh view and questions about it, its kind and their families by `weights`; or questions without a view."""
    shares = {kind: weights[kind] for kind in ("chart", "two_images", "text")}
    shares["scene"] = sum(weights[family] for family in SCENE_FAMILIES) * 0.5 + 0.1
    kind = random.choices(list(shares), list(shares.values()))[0]
    if kind == "text":
        return writer.batch([None], [[ask_text(random) for _ in range(TEXTS)]], [["text"] * TEXTS])
    turns: Asked = []
    while not turns:
        view = sample_view(random, "object_at" if kind == "scene" else kind, GRID, "train")
        turns = turns_about(random, kind, view, weights)
    return writer.batch([view], [turns], [[kind] * len(turns)])


def validation_batches(writer: Writer, per_family: int) -> list[Batch]:
    """Batches of the validation split's questions."""
    batches = []
    for family in FAMILIES:
        views, questions, number = [], [], 0
        for view, pairs in asked_views("validation", family, "llava"):
            views.append(view)
            questions.append(pairs)
            number += len(pairs)
            if number >= per_family:
                break
        for k in range(0, len(views), 4):
            names = [[family] * len(turns) for turns in questions[k : k + 4]]
            batches.append(writer.batch(views[k : k + 4], questions[k : k + 4], names))
    return batches

"""Training and validation sequences: views with question-answer turns, as token ids with labels on the answers only."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from random import Random

import numpy as np
import torch

from eval.world.questions import ASKERS
from eval.world.rows import View, asked_views, images_of, sample_view
from eval.world.textual import ask_text
from eval.world.vocab import FAMILIES, PER_CELL, QWEN_GRIDS, SCENE_FAMILIES

from .text import FORMATS

TURNS = {"scene": 11, "chart": 10, "two_images": 7, "text": 12}
SINGLE_TURN_SHARE = 0.15
LABELS = ("thing", "colour", "role", "background", "row", "column")


@dataclass
class Sequence:
    """One conversation. ``grids`` are the images' sizes in visual tokens."""

    ids: list[int]
    labels: list[int]
    positions: np.ndarray  # (3, length): temporal, height, width (equal for text)
    family: str
    form: str = ""


class Writer:
    """Turns views and questions into sequences in the format of one model."""

    def __init__(self, kind: str, tokenizer):
        self.kind, self.form = kind, FORMATS[kind]
        self.encode = lru_cache(maxsize=200_000)(lambda text: tuple(tokenizer(text)["input_ids"]))
        self.image_id = tokenizer.convert_tokens_to_ids(self.form.image_token)
        self.pad_id = tokenizer.pad_token_id

    def write(self, grids: list[tuple[int, int]], turns: list[tuple[str, str]], family: str = "") -> Sequence:
        form, ids, labels, positions, at = self.form, [], [], [], 0

        def text(piece: str, learn: bool = False) -> None:
            nonlocal at
            tokens = self.encode(piece)
            ids.extend(tokens)
            labels.extend(tokens if learn else [-100] * len(tokens))
            positions.append(np.tile(np.arange(at, at + len(tokens)), (3, 1)))
            at += len(tokens)

        for number, (question, answer) in enumerate(turns):
            prefix = form.before
            for rows, columns in grids if number == 0 else ():
                text(prefix + form.image[0])
                prefix = form.image[1]
                ids.extend([self.image_id] * (rows * columns))
                labels.extend([-100] * (rows * columns))
                height, width = np.divmod(np.arange(rows * columns), columns)
                positions.append(np.stack([np.zeros_like(height), height, width]) + at)
                at += max(rows, columns)
            text(prefix + question + form.between)
            text(form.answer_prefix + answer + form.stop, learn=True)
            if form.after:
                text(form.after)
        return Sequence(ids, labels, np.concatenate(positions, axis=1), family, form_of(turns[0][0]))


@dataclass
class Batch:
    """Padded sequences with all their images (same size within a batch) and the labels of the visual tokens."""

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor  # (3, batch, length)
    pixels: torch.Tensor  # uint8 (images, height, width, 3)
    cells: dict[str, torch.Tensor]  # each (images, rows, columns)
    families: list[str]
    forms: list[str]


def draw_all(views: list[View | None]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Draw the images of all views, in order, with the labels of their visual tokens."""
    drawn = [image.draw() for view in views for image in images_of(view)]
    if not drawn:
        return torch.zeros(0, 144, 144, 3, dtype=torch.uint8), {}
    cells = {key: torch.from_numpy(np.stack([getattr(labels, key) for _, labels in drawn])) for key in LABELS[:4]}
    _, rows, columns = cells["thing"].shape
    cells["row"] = torch.arange(rows)[None, :, None].expand_as(cells["thing"])
    cells["column"] = torch.arange(columns)[None, None, :].expand_as(cells["thing"])
    return torch.from_numpy(np.stack([pixels for pixels, _ in drawn])), cells


def collate(writer: Writer, sequences: list[Sequence], views: list[View | None]) -> Batch:
    """Pad on the right; causal attention never looks there."""
    length = max(len(s.ids) for s in sequences)
    ids = torch.full((len(sequences), length), writer.pad_id)
    labels = torch.full((len(sequences), length), -100)
    positions = torch.zeros(3, len(sequences), length, dtype=torch.long)
    for i, s in enumerate(sequences):
        ids[i, : len(s.ids)] = torch.tensor(s.ids)
        labels[i, : len(s.ids)] = torch.tensor(s.labels)
        positions[:, i, : len(s.ids)] = torch.from_numpy(s.positions)
    pixels, cells = draw_all(views)
    return Batch(ids, labels, positions, pixels, cells, [s.family for s in sequences], [s.form for s in sequences])


def token_grids(view: View | None) -> list[tuple[int, int]]:
    """Sizes of a view's images in visual tokens."""
    if view is None:
        return []
    return [(getattr(i, "rows", 3) * PER_CELL, getattr(i, "columns", 3) * PER_CELL) for i in images_of(view)]


def form_of(question: str) -> str:
    """The wording that a question starts with, which tells the skills within a family apart."""
    words = question.split()
    return words[0] if words[0] in ("The", "Copy", "Reverse", "Sort") else " ".join(words[:2])


def turns_about(rng: Random, kind: str, view: View | None, weights: dict[str, float]) -> list[tuple[str, str]]:
    """Draw turns: families by weight; a form that has a weight of its own is kept with that probability."""
    count = 1 if rng.random() < SINGLE_TURN_SHARE else TURNS[kind]
    turns: list[tuple[str, str]] = []
    shares = [weights[f] for f in SCENE_FAMILIES]
    for _ in range(6 * count):
        family = rng.choices(SCENE_FAMILIES, shares)[0] if kind == "scene" else kind
        turn = ask_text(rng) if kind == "text" else ASKERS[family](rng, view)
        if turn and turn not in turns and rng.random() < weights.get(form_of(turn[0]), 1.0):
            if turn[0].startswith("The ") and any(question.startswith("The ") for question, _ in turns):
                break  # facts of two questions would contradict each other
            turns.append(turn)
        if len(turns) == count:
            break
    return turns


def training_batch(writer: Writer, rng: Random, size: int, weights: dict[str, float]) -> Batch:
    """Make a batch of fresh views and questions; kinds of views and families are drawn by ``weights``."""
    if rng.random() < 0.6 * weights["text"]:  # text-only questions are short: many, alone, make up one batch
        questions: list[tuple[str, str]] = []
        while len(questions) < 6 * size:
            question = ask_text(rng)
            if rng.random() < weights.get(form_of(question[0]), 1.0):
                questions.append(question)
        return collate(writer, [writer.write([], [question]) for question in questions], [])
    grid = (3, 3) if writer.kind == "llava" or rng.random() < 0.5 else rng.choice(QWEN_GRIDS)
    shares = {
        "scene": sum(weights[f] for f in SCENE_FAMILIES) * 0.4 + 0.1,
        "chart": weights["chart"] * (0 if grid != (3, 3) else 1 if writer.kind == "llava" else 2),
        "two_images": weights["two_images"] * 0.8,
        "text": weights["text"],
    }
    sequences, views = [], []
    while len(sequences) < size:
        kind = rng.choices(list(shares), list(shares.values()))[0]
        family = "object_at" if kind == "scene" else kind
        view = None if kind == "text" else sample_view(rng, family, grid, "train")
        if turns := turns_about(rng, kind, view, weights):
            sequences.append(writer.write(token_grids(view), turns))
            views.append(view)
    return collate(writer, sequences, views)


def validation_batches(writer: Writer, per_family: int, size: int = 24) -> list[Batch]:
    """Make batches of single-turn questions of the validation split, whose images have one size per batch."""
    groups: dict[tuple, list[tuple[Sequence, View | None]]] = {}
    for family in FAMILIES:
        pairs = ((v, qa) for v, turns in asked_views("validation", family, writer.kind) for qa in turns[:2])
        for view, turn in islice(pairs, per_family):
            grids = token_grids(view)
            key = (tuple(grids[:1]), len(grids))
            groups.setdefault(key, []).append((writer.write(grids, [turn], family), view))
    return [
        collate(writer, [s for s, _ in members[i : i + size]], [v for _, v in members[i : i + size]])
        for members in groups.values()
        for i in range(0, len(members), size)
    ]

"""The tower learns to write: each visual token becomes the embedding of a word, and an image a text of 81 words (`table.py`).

demo-llava's tower is frozen; layers on top of it and the projector learn. The language model does not run, so this takes
minutes. The loss is the squared distance from the word's embedding, next to the cross entropy of choosing it among all words
that there are by the distances from their embeddings. What is shipped is an average over the last steps.
"""

import json
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from eval.world.rows import View, asked_views, images_of, sample_view
from eval.world.vocab import BACKGROUNDS, COLOURS, DIGITS, LETTERS, SHAPES

from .assemble import written_by
from .table import token_ids, written
from .training import Training

EMA = 0.995
BATCH = 12  # images
CHARTS = 0.25  # share of them
WORDS = (
    *(" row", " column", " the", " bar", ":", ".", " nothing", " digit", " large", " small"),
    *DIGITS,
    *(f" {word}" for word in (*SHAPES, *COLOURS, *BACKGROUNDS, *LETTERS)),
)


@dataclass
class Plan:
    """Settings of a training, from the command line."""

    minutes: float
    rate: float = 1e-3
    seed: int = 0
    validate_every: float = 60.0  # seconds
    images: int = 60  # of a kind, in validation


class Writing(Training):
    """State of one training."""

    def __init__(
        self, plan: Plan, model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
    ):
        self.plan = plan
        self.tower, self.projector = model.model.vision_tower.requires_grad_(False), model.model.multi_modal_projector
        learned = {name: p.requires_grad_(True) for name, p in written_by(model).items()}
        optimizer = torch.optim.AdamW(learned.values(), weight_decay=0.01, fused=True)
        super().__init__(learned, folder / "writing.pt", EMA, optimizer)
        self.resume()
        self.numbers = {word: number for number, word in enumerate(WORDS)}
        table = model.get_input_embeddings().weight.detach()
        self.words = table[token_ids(list(WORDS), lambda text: tuple(tokenizer(text)["input_ids"]))]
        self.validation = {
            kind: [view for view, _ in islice(asked_views("validation", kind, "llava"), plan.images)]
            for kind in ("object_at", "chart")
        }

    def run(self) -> None:
        """Train until the plan's minutes are over."""
        random, last, validated = Random(f"{self.plan.seed}/{self.step}"), time.monotonic(), self.spent
        while self.spent < self.plan.minutes * 60:
            kinds = ["chart" if random.random() < CHARTS else "object_at" for _ in range(BATCH)]
            features, targets = self.read([sample_view(random, kind, (3, 3), "train") for kind in kinds])
            distance = F.mse_loss(features, self.words[targets]) / self.words.var()
            loss = distance + F.cross_entropy(self.scores(features), targets)
            loss.backward()
            self.update(self.rate())
            now = time.monotonic()
            self.spent, last = self.spent + now - last, now
            if self.spent - validated > self.plan.validate_every:
                self.validate(distance.item())
                last, validated = time.monotonic(), self.spent
        self.save()

    def read(self, views: list[View]) -> tuple[Tensor, Tensor]:
        """Visual tokens (tokens, hidden) of views, and the numbers of the words that they should be (tokens)."""
        images = [image for view in views for image in images_of(view)]
        pixels = torch.stack([torch.from_numpy(image.draw()[0]) for image in images]).permute(0, 3, 1, 2)
        x = (pixels.float() / 255 - 0.5) / 0.5
        hidden = self.tower(x, output_hidden_states=True).hidden_states[-2][:, 1:]
        targets = torch.tensor([self.numbers[word] for image in images for word in written(image)])
        return self.projector(hidden).flatten(0, 1), targets

    def scores(self, features: Tensor) -> Tensor:
        """(tokens, words): minus the squared distances from the words, in the words' own variance."""
        return -torch.cdist(features, self.words).square() / self.words.var() / self.words.shape[1] * 8

    def rate(self) -> float:
        """The learning rate: constant after a few steps, and falling in the last third of the time."""
        left = 1 - self.spent / 60 / self.plan.minutes
        return self.plan.rate * min(1.0, (self.step + 1) / 100) * min(1.0, 0.02 + left * 3)

    @torch.no_grad()
    def validate(self, distance: float) -> None:
        """Print the shares of words and of whole entries that are right, and save."""
        line = {"step": self.step, "minutes": round(self.spent / 60, 1), "distance": round(distance, 4)}
        for kind, views in self.validation.items():
            features, targets = self.read(views)
            right = self.scores(features).argmax(-1) == targets
            line[kind] = round(right.float().mean().item(), 4)
            line[f"{kind}, entries"] = round(right.view(-1, 9).all(-1).float().mean().item(), 4)
        print(json.dumps(line), flush=True)
        self.save()

"""The language model learns to read: to answer questions about an image from the words that the tower writes of it.

Low-rank adapters learn answers; every few steps also English prose, plain or as an answer in a chat, whose next-token
probabilities must be those of the package's model before it left its 4-bit grid (`off_grid.py`). Families are drawn in
proportion to how badly they do. What is shipped is an average over the last steps. The learning rate is constant but for the
last fifth of the time, so a training can be resumed with more minutes. Several processes train on images of their own and take
the mean of their weights every few steps (local SGD, arXiv 1805.09767); the first one measures and saves.
"""

import json
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eval import english
from eval.world.vocab import FAMILIES

from .learner import Learner, accuracy
from .off_grid import leave_grid
from .sequences import BEFORE, BETWEEN, Writer, training_batch, validation_batches
from .training import Training

EMA = 0.99
PROSE_EVERY = 3  # steps
PROSE = (2, 160)  # texts and tokens of each
PROSE_WEIGHT = 2.0
TOGETHER = 4  # steps between means over processes


@dataclass
class Plan:
    """Settings of a training, from the command line."""

    minutes: float
    rate: float = 1e-3
    seed: int = 0
    validate_every: float = 400.0  # seconds
    questions: int = 12  # of a family, in validation
    start: Path | None = None  # adapters to begin with; None: random ones


class Reading(Training):
    """State of one training."""

    def __init__(self, plan: Plan, language: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path):
        original = deepcopy(language)
        leave_grid(language, plan.seed)
        self.plan, self.learner, self.tokenizer = plan, Learner(language, original), tokenizer
        learned = self.learner.learned()
        optimizer = torch.optim.AdamW(learned.values(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        super().__init__(learned, folder / "reading.pt", EMA, optimizer)
        self.writer = Writer(tokenizer)
        state = self.resume(plan.start)
        self.weights = state.get("weights", dict.fromkeys(FAMILIES, 0.5))
        self.questions = state.get("questions", 0)
        self.validation = validation_batches(self.writer, plan.questions)

    def log(self, **values: object) -> None:
        line = {"step": self.step, "minutes": round(self.spent / 60, 1), "questions": self.questions} | values
        print(json.dumps(line), flush=True)

    def run(self) -> None:
        """Train until the plan's minutes are over."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        random = Random(f"{self.plan.seed}/{self.step}/{rank}")
        last, losses, drifts, validated = time.monotonic(), [], [], self.spent
        while self.step % TOGETHER or self.spent < self.plan.minutes * 60:
            loss = self.answer_loss(random)
            if self.step % PROSE_EVERY == 0:
                drift = self.learner.drift(self.prose(random))
                drifts.append(drift.item())
                loss = loss + PROSE_WEIGHT * drift
            loss.backward()
            self.update(self.rate())
            losses.append(loss.item())
            now = time.monotonic()
            self.spent, last = self.spent + (now - last) * (rank == 0), now
            if dist.is_initialized() and self.step % TOGETHER == 0:
                self.spent, *shares = self.meet([self.spent, *self.weights.values()])
                self.weights = dict(zip(self.weights, shares, strict=True))
            if rank == 0 and self.spent - validated > self.plan.validate_every:
                self.validate(_mean(losses), _mean(drifts))
                last, validated, losses, drifts = time.monotonic(), self.spent, [], []
        if rank == 0:
            self.save(weights=self.weights, questions=self.questions)

    def answer_loss(self, random: Random) -> Tensor:
        batch = training_batch(self.writer, random, self.weights)
        self.questions += sum(map(len, batch.families))
        logits, target, _ = self.learner.answer_logits(batch)
        return F.cross_entropy(logits, target)

    def prose(self, random: Random) -> Tensor:
        """(texts, tokens) of English, every other text in the form of a chat."""
        rows: list[list[int]] = []
        while len(rows) < PROSE[0]:
            text = random.choice(english.paragraphs("train"))
            if len(rows) % 2:
                text = BEFORE + BETWEEN.join(english.halves(text))
            ids = self.tokenizer(text)["input_ids"][: PROSE[1]]
            if len(ids) == PROSE[1]:
                rows.append(ids)
        return torch.tensor(rows)

    def rate(self) -> float:
        """The learning rate: constant after a few steps, and falling in the last fifth of the time."""
        done = self.spent / 60 / self.plan.minutes
        return self.plan.rate * min(1.0, (self.step + 1) / 40) * min(1.0, 0.05 + (1 - done) * 4.75)

    def validate(self, loss: float, drift: float) -> None:
        current = self.put(self.ema)
        right = accuracy(self.learner, self.validation)
        self.put(current)
        self.weights = {family: min(1.0, 0.08 + 1 - right[family]) for family in FAMILIES}
        overall = sum(right.values()) / len(right)
        families = {family: round(right[family], 2) for family in FAMILIES}
        self.log(loss=round(loss, 4), drift=round(drift, 4), overall=round(overall, 3), **families)
        self.save(weights=self.weights, questions=self.questions)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))

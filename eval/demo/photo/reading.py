"""Projector and language model learn to answer questions about scenes, from the frozen tower's features in the pool.

The projector begins where `warmup.py` left it, and keeps that loss with a small weight. Low-rank adapters of the
language model learn answers; every few steps also English prose, whose next-token probabilities must stay those of
the package's model. Families are drawn in proportion to how badly they do on validation scenes. What is shipped is an
average over the last steps. Time is the processor's, so that a training that shares its machine is the same training.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eval import english
from eval.demo.smol.learner import Learner
from eval.demo.smol.training import Training
from eval.photo.vocab import FAMILIES

from .pool import Pool
from .sequences import BEFORE, BETWEEN, Sequence, Writer, gaps, some_turns
from .warmup import Projector, Words, batch

EMA = 0.99
SCENES = 1  # of a step
PROSE_EVERY, PROSE, PROSE_WEIGHT = 10, (2, 96), 2.0  # steps; texts and tokens of each
TOGETHER, SAVED = 4, 40  # steps between means over processes, and between saved states
START_WEIGHT = 0.1  # of the warm-up's loss


@dataclass
class Plan:
    """Settings of a training, from the command line."""

    minutes: float  # of the processor
    rate: float = 1e-3
    seed: int = 0
    robust: bool = False  # leave out visual tokens at random
    fork: float = 50.0  # minutes after which a copy of the state is kept
    validate_every: float = 600.0  # seconds
    validated: int = 30  # scenes


class Reader(Learner):
    """The language model with adapters, and the projector before it."""

    def __init__(self, language: LlamaForCausalLM, projector: Projector):
        super().__init__(language)
        self.projector = projector

    def learned(self) -> dict[str, nn.Parameter]:
        """All that is trained, by the names of the shipped file."""
        projector = {f"projector.{name}": p for name, p in self.projector.named_parameters()}
        return super().learned() | projector

    def logits(self, sequence: Sequence, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits at the positions before answer tokens, those tokens, and the question of each; features [256, 384]."""
        embeds = self.language.get_input_embeddings()(sequence.ids)
        visual = self.projector(features[sequence.kept])
        embeds = torch.cat([embeds[: sequence.image.start], visual, embeds[sequence.image.stop :]])[None]
        hidden = self.language.model(
            inputs_embeds=embeds, attention_mask=sequence.mask(), position_ids=sequence.positions[None], use_cache=False
        ).last_hidden_state[0, :-1]
        target = sequence.labels[1:]
        learn = target != -100
        return self.language.lm_head(hidden[learn]), target[learn], sequence.turns[1:][learn] - 1


class Reading(Training):
    """State of one training."""

    def __init__(
        self, plan: Plan, language: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, projector: Projector,
        pools: tuple[Pool, Pool], names: list[str], state: Path, fork: Path, report: Callable[..., None],
    ):  # fmt: skip
        self.plan, self.reader, self.tokenizer, self.names = plan, Reader(language, projector), tokenizer, names
        super().__init__(self.reader.learned(), state, EMA, lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.pool, self.validation = pools
        self.fork, self.report = fork, report
        self.writer = Writer(tokenizer, self.pool.features.shape[1])
        self.words = Words(language.get_input_embeddings().weight.detach(), self.writer.encode, names)
        kept = self.resume()
        self.weights = kept.get("weights", dict.fromkeys(FAMILIES, 0.5))
        self.questions = kept.get("questions", 0)

    def run(self) -> None:
        """Train until the plan's minutes are over. The first of several processes measures and saves."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        random = Random(f"{self.plan.seed}/{self.plan.robust}/{self.step}/{rank}")
        last, losses, drifts, validated = time.process_time(), [], [], self.spent
        while self.step % TOGETHER or self.spent < self.plan.minutes * 60:
            loss = self.answer_loss(random)
            losses.append(loss.item())
            if self.step % PROSE_EVERY == 0:
                drift = self.reader.drift(self.prose(random))
                drifts.append(drift.item())
                loss = loss + PROSE_WEIGHT * drift
            tokens, labels, patches = batch(
                random.sample(range(len(self.pool.scenes)), 4), self.words, self.pool, random
            )
            loss = loss + START_WEIGHT * self.words.loss(self.reader.projector(tokens), labels, patches)[0]
            self.update(loss, self.rate())
            now = time.process_time()
            self.spent, last = self.spent + now - last, now
            if dist.is_initialized() and self.step % TOGETHER == 0:
                self.spent, *shares = self.meet([self.spent, *self.weights.values()])
                self.weights = dict(zip(self.weights, shares, strict=True))
            due = not self.plan.robust and self.spent >= self.plan.fork * 60 and not self.fork.exists()
            if rank == 0 and (due or self.spent - validated > self.plan.validate_every):
                self.validate(_mean(losses), _mean(drifts))
                last, validated, losses, drifts = time.process_time(), self.spent, [], []
                if due:
                    shutil.copy(self.state, self.fork)
            elif rank == 0 and self.step % SAVED == 0:
                self.save(weights=self.weights, questions=self.questions)
        if rank == 0:
            self.validate(_mean(losses), _mean(drifts))

    def answer_loss(self, random: Random) -> Tensor:
        losses = []
        for k in random.sample(range(len(self.pool.scenes)), SCENES):
            turns = some_turns(random, self.pool.scenes[k], self.names, self.weights)
            self.questions += len(turns)
            sequence = self.writer.write(turns, gaps(random, self.writer.tokens) if self.plan.robust else None)
            logits, target, _ = self.reader.logits(sequence, torch.from_numpy(self.pool.features[k]).float())
            losses.append(F.cross_entropy(logits, target))
        return torch.stack(losses).mean()

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
        right, quarter = self.accuracy(1.0), self.accuracy(0.25)
        self.put(current)
        self.weights = {family: min(1.0, 0.08 + 1 - right.get(family, 0.5)) for family in FAMILIES}
        self.report(
            robust=self.plan.robust, step=self.step, minutes=round(self.spent / 60, 1), questions=self.questions,
            loss=round(loss, 4), drift=round(drift, 4), overall=round(_mean(list(right.values())), 3),
            quarter=round(_mean(list(quarter.values())), 3), **{name: round(v, 2) for name, v in right.items()},
        )  # fmt: skip
        self.save(weights=self.weights, questions=self.questions)

    @torch.no_grad()
    def accuracy(self, share: float) -> dict[str, float]:
        """Share of validation questions by family whose answer tokens, the stop included, are all the most likely ones.

        `share`: of visual tokens that are there, drawn at random."""
        right: dict[str, list[bool]] = {}
        for k in range(min(self.plan.validated, len(self.validation.scenes))):
            random = Random(f"validation/{k}")
            turns = some_turns(random, self.validation.scenes[k], self.names, dict.fromkeys(FAMILIES, 1.0))
            total = self.writer.tokens
            sequence = self.writer.write(turns, sorted(random.sample(range(total), round(total * share))))
            features = torch.from_numpy(self.validation.features[k]).float()
            logits, target, owner = self.reader.logits(sequence, features)
            wrong = set(owner[logits.argmax(-1) != target].tolist())
            for turn, family in enumerate(sequence.families):
                right.setdefault(family, []).append(turn not in wrong)
        return {family: sum(hits) / len(hits) for family, hits in right.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))

"""The language model learns to answer questions about scenes; on tokens that say what is there, then on the projector's.

Part ``language``: tokens are the sums of `warmup.Words`, with noise, of fresh scenes of which nothing is drawn. Part
``joint``: what the projector makes of the frozen tower's features, the things moved to pictures that nobody drew
(`unseen`): of the training pictures the projector's tokens would be right more often than of others, and soon known by
heart. Families are drawn in proportion to how badly they do on validation scenes. What is shipped is an average over the
last steps. Time is the processor's, so that a training that shares its machine is the same training.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eval.demo.smol.training import Training
from eval.photo.pictures import Album
from eval.photo.scene import sample_scene
from eval.photo.vocab import FAMILIES

from .muon import Muon
from .pool import Pool
from .sequences import Sequence, Writer, few, gaps, some_turns
from .unseen import Unseen
from .warmup import Projector, Words

EMA = 0.99
SCENES = 4  # of a step
TOGETHER, SAVED = 4, 40  # steps between means over processes, and between saved states
NOISE = 0.3  # of ideal tokens, in their standard deviation, so that the language model tolerates real ones
FREE, TWICE = ("name",), ("beside", "larger")  # families that are drawn less often: without options, or of two steps
DECAY = 0.4  # last share of the time of `joint` in which the rate falls


@dataclass
class Plan:
    """Settings of a training, from the command line."""

    part: str  # "language" or "joint"
    minutes: float  # of the processor
    rate: float = 1e-3
    seed: int = 0
    robust: bool = False  # leave out visual tokens at random
    fork: float = 50.0  # minutes of `joint` after which a copy of the state is kept
    validate_every: float = 150.0  # seconds
    validated: int = 60  # scenes


class Reader(nn.Module):
    """Words, the projector and the language model; what is trained has the names of the shipped file."""

    def __init__(self, language: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, names: list[str]):
        super().__init__()
        self.language = language.train()
        self.projector = Projector(language.config.hidden_size)
        encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
        self.words = Words(language.get_input_embeddings(), encode, names)

    def learned(self, part: str) -> dict[str, nn.Parameter]:
        """What a part trains."""
        prefixes = ("language.", "words.") if part == "language" else ("language.",)
        return {name: p for name, p in self.named_parameters() if name.startswith(prefixes)}

    def logits(self, sequence: Sequence, visual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits at the positions before answer tokens, those tokens, and the question of each; visual [kept, hidden]."""
        embeds = self.language.get_input_embeddings()(sequence.ids)
        embeds = torch.cat([embeds[: sequence.image.start], visual, embeds[sequence.image.stop :]])[None]
        hidden = self.language.model(
            inputs_embeds=embeds, attention_mask=sequence.mask(), position_ids=sequence.positions[None], use_cache=False
        ).last_hidden_state[0, :-1]
        target = sequence.labels[1:]
        learn = target != -100
        return self.language.lm_head(hidden[learn]), target[learn], sequence.turns[1:][learn] - 1


def optimizers_of(learned: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the decoder blocks, AdamW for the rest, with rates that mean the same (as in `stages`)."""
    matrices = [p for name, p in learned.items() if ".layers." in name and p.ndim == 2]
    rest = [p for p in learned.values() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
        Muon(matrices),
    ]


class Reading(Training):
    """State of one training."""

    def __init__(
        self, plan: Plan, reader: Reader, tokenizer: PreTrainedTokenizerFast, pools: tuple[Pool, Pool], album: Album,
        state: Path, report: Callable[..., None],
    ):  # fmt: skip
        self.plan, self.reader, self.album, self.report = plan, reader, album, report
        learned = reader.learned(plan.part)
        super().__init__(learned, state, EMA, *optimizers_of(learned))
        self.pool, self.validation = pools
        self.writer = Writer(tokenizer, self.pool.features.shape[1])
        extra = self.resume()
        self.weights = extra.get("weights", drawn_by({}))
        self.questions = extra.get("questions", 0)

    @cached_property
    def unseen(self) -> Unseen:
        return Unseen(self.pool)

    def run(self) -> None:
        """Train until the plan's minutes are over. The first of several processes measures and saves."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        random = Random(f"{self.plan.seed}/{self.plan.part}/{self.plan.robust}/{self.step}/{rank}")
        torch.manual_seed(random.randrange(1 << 30))
        fork = self.state.with_name("fork.pt")
        last, losses, validated = time.process_time(), [], self.spent
        while self.step % TOGETHER or self.spent < self.plan.minutes * 60:
            losses.append(self.learn(random))
            now = time.process_time()
            self.spent, last = self.spent + now - last, now
            if dist.is_initialized() and self.step % TOGETHER == 0:
                self.spent, *shares = self.meet([self.spent, *self.weights.values()])
                self.weights = dict(zip(self.weights, shares, strict=True))
            forks = self.plan.part == "joint" and not self.plan.robust and not fork.exists()
            due = forks and self.spent >= self.plan.fork * 60
            if rank == 0 and (due or self.spent - validated > self.plan.validate_every):
                self.validate(_mean(losses))
                last, validated, losses = time.process_time(), self.spent, []
                if due:
                    shutil.copy(self.state, fork)
            elif rank == 0 and self.step % SAVED == 0:
                self.save(weights=self.weights, questions=self.questions)
                recent = round(_mean(losses[-SAVED:]), 4)
                self.report(part=self.plan.part, step=self.step, minutes=round(self.spent / 60, 1), loss=recent)
        if rank == 0:
            self.validate(_mean(losses))

    def learn(self, random: Random) -> float:
        """Take a step on some scenes; returns the loss of answers."""
        total = 0.0
        for _ in range(SCENES):
            loss = self.seen(random) if self.plan.part == "joint" else self.described(random)
            (loss / SCENES).backward()
            total += loss.item() / SCENES
        self.update(self.rate())
        return total

    def described(self, random: Random) -> Tensor:
        """The loss of a fresh scene's answers, of which the tokens say what is there."""
        scene = sample_scene(random, "train", self.album)
        items = scene.covered(self.album)[1]
        turns = some_turns(random, scene, self.album.names, self.weights)
        sequence = self.writer.write(turns, few(random, items.flatten().tolist()))
        visual = self.reader.words.ideal(self.reader.words.labels(scene, items))[sequence.kept]
        visual = visual + NOISE * visual.detach().std() * torch.randn_like(visual)
        return self.answer_loss(sequence, visual)

    def seen(self, random: Random) -> Tensor:
        """The loss of answers about a scene of the pool with things that nobody drew."""
        scene, features = self.unseen.draw(random, random.randrange(len(self.pool.scenes)))
        turns = some_turns(random, scene, self.album.names, self.weights)
        sequence = self.writer.write(turns, gaps(random, self.writer.tokens) if self.plan.robust else None)
        return self.answer_loss(sequence, self.reader.projector(features[sequence.kept]).detach())

    def answer_loss(self, sequence: Sequence, visual: Tensor) -> Tensor:
        self.questions += len(sequence.families)
        logits, target, _ = self.reader.logits(sequence, visual)
        return F.cross_entropy(logits, target)

    def rate(self) -> float:
        """The learning rate: constant after a few steps; that of `joint` falls in the end."""
        done = self.spent / 60 / self.plan.minutes
        falling = 1.0 if self.plan.part == "language" else min(1.0, 0.05 + 0.95 * (1 - done) / DECAY)
        return self.plan.rate * min(1.0, (self.step + 1) / 80) * falling

    def validate(self, loss: float) -> None:
        current = self.put(self.ema)
        right = self.accuracy(1.0)
        quarter = self.accuracy(0.25) if self.plan.part == "joint" else right
        self.put(current)
        self.weights = drawn_by(right)
        self.report(
            part=self.plan.part, robust=self.plan.robust, step=self.step, minutes=round(self.spent / 60, 1),
            questions=self.questions, loss=round(loss, 4), overall=round(_mean(list(right.values())), 3),
            quarter=round(_mean(list(quarter.values())), 3), **{name: round(v, 2) for name, v in right.items()},
        )  # fmt: skip
        self.save(weights=self.weights, questions=self.questions)

    @torch.no_grad()
    def accuracy(self, share: float) -> dict[str, float]:
        """Share of validation questions by family whose answer tokens, the stop included, are all the most likely ones.

        `share`: of visual tokens that are there, drawn at random."""
        right: dict[str, list[bool]] = {}
        for k in range(min(self.plan.validated, len(self.validation.scenes))):
            random, scene = Random(f"validation/{k}"), self.validation.scenes[k]
            turns = some_turns(random, scene, self.album.names, dict.fromkeys(FAMILIES, 1.0))
            total = self.writer.tokens
            sequence = self.writer.write(turns, sorted(random.sample(range(total), round(total * share))))
            if self.plan.part == "joint":
                visual = self.reader.projector(torch.from_numpy(self.validation.features[k]).float())
            else:
                visual = self.reader.words.ideal(self.reader.words.labels(scene, self.validation.items[k]))
            logits, target, owner = self.reader.logits(sequence, visual[sequence.kept])
            wrong = set(owner[logits.argmax(-1) != target].tolist())
            for turn, family in enumerate(sequence.families):
                right.setdefault(family, []).append(turn not in wrong)
        return {family: sum(hits) / len(hits) for family, hits in right.items()}


def drawn_by(right: dict[str, float]) -> dict[str, float]:
    """How often each family is drawn, by the share of its questions that are answered right (default: a half)."""
    usual = {family: 0.3 if family in FREE else 0.4 if family in TWICE else 1.0 for family in FAMILIES}
    return {family: usual[family] * min(1.0, 1.08 - right.get(family, 0.5)) for family in FAMILIES}


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))

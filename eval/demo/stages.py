"""Training in three stages, each of which removes one difficulty of training on answers alone (a plateau).

language  the LLM learns the questions on oracle visual tokens: perception is no problem there, so skills come fast
tower     tower and projector learn to produce the oracle's tokens, and to tell what each token lies on (dense supervision)
joint     everything end to end on the answers, the dense losses kept at a small weight; learning rate decays at the end

Families are drawn in proportion to how badly they do. The layers' matrices are trained by Muon,
the rest by AdamW.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.nn import functional as F

from eval.world.vocab import FAMILIES

from .architectures import build_model
from .learner import Learner, accuracy
from .sequences import Batch, Writer, training_batch, validation_batches
from .text import build_tokenizer
from .transfer import adopt

STAGES = ("language", "tower", "joint")
SHARES = (0.50, 0.10, 0.40)  # of the time, by stage
RATES = (1e-3, 1.5e-3, 8e-4)  # learning rates, by stage
CONVERSATIONS = 8  # in a batch
VALIDATE_EVERY = 150.0  # seconds
DENSE_WEIGHT = 0.1
ORACLE_NOISE = 0.15  # share of the oracle tokens' standard deviation, so that the LLM tolerates an inexact tower
EMA = 0.99  # decay of the joint stage's averaged weights, which are exported


@dataclass
class Plan:
    """Settings of a training, from the command line."""

    kind: str
    minutes: float
    seed: int
    donor: Path | None = None  # training folder of the other demo: its language model is the start


class Trainer:
    """State of one training: the learner, the family weights, and where in the plan it is."""

    def __init__(self, plan: Plan, folder: Path, resume: bool):
        self.plan, self.folder = plan, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = build_tokenizer(plan.kind)
        self.writer = Writer(plan.kind, self.tokenizer)
        model = build_model(plan.kind, self.tokenizer, plan.seed)
        self.learner = Learner(plan.kind, model, self.writer.image_id)
        self.learner.share_geometry(self.tokenizer)
        if plan.donor:
            other = "llava" if plan.kind == "qwen" else "qwen"
            state = torch.load(plan.donor / "state.pt")
            adopt(self.learner, self.tokenizer, state, build_tokenizer(other))
        self.weights = dict.fromkeys(FAMILIES, 0.5)
        self.stage, self.spent, self.step = 0, 0.0, 0
        self.total = 0.0
        self.ema: dict[str, torch.Tensor] = {}
        self.averaged = 0
        if resume and (folder / "state.pt").exists():
            state = torch.load(folder / "state.pt")
            self.learner.load_state_dict(state["learner"])
            self.weights, self.ema = state["weights"], state["ema"]
            self.stage, self.spent, self.step, self.total = state["place"]
        self.rng = Random(f"{plan.seed}/{plan.kind}/{self.step}")
        self.validation = validation_batches(self.writer, 40)

    def save(self) -> None:
        place = (self.stage, self.spent, self.step, self.total)
        state = {"learner": self.learner.state_dict(), "weights": self.weights, "ema": self.ema, "place": place}
        temporary = self.folder / "state.tmp"
        torch.save(state, temporary)
        temporary.rename(self.folder / "state.pt")

    def log(self, **values) -> None:
        line = {"stage": STAGES[self.stage], "step": self.step, "minutes": round(self.total / 60, 1)} | values
        print(json.dumps(line), flush=True)

    def run(self) -> None:
        while self.stage < len(STAGES):
            self.run_stage()
            self.stage, self.spent = self.stage + 1, 0.0
            self.save()

    def run_stage(self) -> None:
        """Train until the stage's time is over, or (first stage) until every family is learned."""
        name, budget = STAGES[self.stage], self.plan.minutes * 60 * SHARES[self.stage]
        optimizers = self.optimizers(name)
        loss_of: Callable[[Batch], tuple[torch.Tensor, dict]] = getattr(self, f"{name}_loss")
        last, warm = time.monotonic(), 0
        next_validation = self.spent + VALIDATE_EVERY
        recent: list[float] = []
        while self.spent < budget:
            batch = training_batch(self.writer, self.rng, CONVERSATIONS, self.weights)
            if name == "tower" and not len(batch.pixels):
                continue
            warm += 1
            scale = min(1.0, warm / 80) * self.decay(name, self.spent / budget)
            with torch.autocast("cpu", torch.bfloat16, enabled=name != "tower"):
                loss, notes = loss_of(batch)
            self.update(optimizers, loss, scale)
            recent.append(loss.item())
            self.step += 1
            now = time.monotonic()
            self.spent, self.total, last = self.spent + now - last, self.total + now - last, now
            if self.spent >= next_validation:
                self.validate(name, sum(recent) / len(recent), notes)
                self.save()
                recent = []
                next_validation = self.spent + VALIDATE_EVERY
                if name == "language" and max(self.weights[f] for f in FAMILIES) < 0.08:
                    break
                last = time.monotonic()

    @staticmethod
    def decay(name: str, done: float) -> float:
        """Factor of the learning rate: no decay before the last skill has come; then linear to a twentieth."""
        start = {"language": 1.0, "tower": 0.6, "joint": 0.6}[name]
        return 1.0 if done <= start else 1.0 - 0.95 * (done - start) / (1 - start)

    def optimizers(self, name: str) -> list[torch.optim.Optimizer]:
        learner, rate = self.learner, RATES[self.stage]
        groups = {
            "language": [*learner.language_parameters(), *learner.oracle.parameters()],
            "tower": [*learner.tower_parameters(), *learner.heads.parameters()],
        }
        chosen = {id(p) for p in groups.get(name, groups["tower"] + learner.language_parameters())}
        matrices, rest = [], []
        for key, p in learner.named_parameters():
            if id(p) in chosen:
                layered = p.ndim == 2 and any(part in key for part in ("layers.", "blocks."))
                (matrices if layered else rest).append(p)
        result: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, ns_steps=4, adjust_lr_fn="match_rms_adamw"),
        ]
        for optimizer in result:
            for group in optimizer.param_groups:
                group["rate"] = rate
        return result

    def update(self, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor, scale: float) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * scale
            optimizer.step()
        self.learner.zero_grad(set_to_none=True)
        if STAGES[self.stage] == "joint":
            self.update_ema()

    @torch.no_grad()
    def update_ema(self) -> None:
        self.averaged += 1
        keep = min(EMA, self.averaged / (self.averaged + 10))
        for key, value in self.learner.model.state_dict().items():
            if key in self.ema:
                self.ema[key].lerp_(value.float(), 1 - keep)
            else:
                self.ema[key] = value.float().clone()

    def language_loss(self, batch: Batch) -> tuple[torch.Tensor, dict]:
        visual = None
        if len(batch.pixels):
            visual = self.learner.oracle(batch.cells)
            visual = visual + torch.randn_like(visual) * (ORACLE_NOISE * visual.detach().std())
        logits, target = self.learner.answer_logits(batch, visual)
        return F.cross_entropy(logits, target), {}

    def tower_loss(self, batch: Batch) -> tuple[torch.Tensor, dict]:
        with torch.no_grad():
            target = self.learner.oracle(batch.cells)
        visual = self.learner.look(batch.pixels)
        error = F.mse_loss(visual, target) / target.var()
        dense, right = self.learner.heads(visual, batch.cells)
        return 4 * error + dense, right | {"error": error.item()}

    def joint_loss(self, batch: Batch) -> tuple[torch.Tensor, dict]:
        if not len(batch.pixels):
            return self.language_loss(batch)
        visual = self.learner.look(batch.pixels)
        logits, target = self.learner.answer_logits(batch, visual)
        dense, right = self.learner.heads(visual.float(), batch.cells)
        return F.cross_entropy(logits, target) + DENSE_WEIGHT * dense, right

    def validate(self, name: str, loss: float, notes: dict) -> None:
        """Measure accuracy by family, and set the families' weights: the worse one does, the more it is drawn."""
        with torch.autocast("cpu", torch.bfloat16):
            right = accuracy(self.learner, self.validation, oracle=name == "language")
        if name != "tower":
            self.weights = {f: min(1.0, 0.05 + (1 - right[f])) for f in right}
        notes = {key: round(value, 3) for key, value in notes.items()}
        overall = sum(right[f] for f in FAMILIES) / len(FAMILIES)
        self.log(loss=round(loss, 4), overall=round(overall, 3), **{f: round(right[f], 2) for f in FAMILIES}, **notes)
        self.log(forms={form: round(value, 2) for form, value in right.items() if form not in FAMILIES})

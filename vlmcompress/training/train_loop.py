"""The loop of a recovery: AdamW on a few tensors, judged by samples that it never trains on, and the best state is kept.

The learning rate rises over the first steps and falls to zero as a cosine. Gradients are clipped to a norm of 1. Every so
many steps the divergence of the held-out samples is measured. The loop ends early where it has not been lower than before for
as many measurements as the settings say, and where it diverges: a loss that is not finite, or a held-out divergence above
`DIVERGED` times the first one. What the loop goes by is stored at each measurement, so that a run that goes on from there
comes to the same bits.

Workers of one run (`utils.distributed`) share out the samples of a step, and their gradients are added up: the same step as
one worker does but for the order of sums. Each changes its own copy of what is trained in the same way; the first keeps the
state.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlmcompress.utils import distributed, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent
from vlmcompress.utils.work_folder import WorkFolder

PATIENCE = 4
"""How many measurements in a row may be no better than the best, where the settings do not say."""
DIVERGED = 2.0
WARM_UP = 0.1  # share of the steps in which the rate rises
MOST_WARM_UP = 20  # steps
_NOISE = 1e-4  # nats: below it a divergence is what rounding makes
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class LoopSettings:
    """Settings of a loop.

    Attributes:
        steps: most steps.
        batch: samples of a step.
        lr: the highest learning rate.
        every: steps between two measurements of the held-out samples.
        seed: of the order of samples.
        label: of the progress.
        patience: how many measurements in a row may be no better than the best.
        diverged: a held-out divergence of so many times the first ends the run.
    """

    steps: int
    batch: int
    lr: float
    every: int
    seed: int
    label: str = "recovering"
    patience: int = PATIENCE
    diverged: float = DIVERGED

    @classmethod
    def of(cls, flags: Any, seed: int, label: str = "recovering", **settings: Any) -> LoopSettings:
        """The settings that a training's flags (`steps`, `batch`, `lr`, `every`) give."""
        return cls(flags.steps, flags.batch, flags.lr, flags.every, seed, label, **settings)


def check_flags(training: Any, *counts: str) -> None:
    """Raise UserError where a field of a training's flags named in `counts` is below 1, or its `lr` not between 0 and 1."""
    for name in counts:
        if getattr(training, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(training, name)}; it should be at least 1")
    if not 0 < training.lr < 1:
        raise UserError(f"--lr is {training.lr:g}; it should be above 0 and below 1, such as 1e-4")


@dataclass
class TrainLog:
    """How a run went so far.

    Attributes:
        first: divergence of the held-out samples before training, in nats.
        step: steps that were done.
        best, best_step: the lowest divergence so far, and after which step; 0: before training.
        history: (step, divergence) of each measurement.
        ended: why the run ended before its last step, in words; None: it did not.
    """

    first: float
    step: int = 0
    best: float = math.inf
    best_step: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)
    ended: str | None = None

    def __post_init__(self) -> None:
        self.best = min(self.best, self.first)
        self.history = [(int(step), value) for step, value in self.history]

    def record(self, value: float, patience: int = PATIENCE, diverged: float = DIVERGED) -> bool:
        """Record the held-out loss after `step`; True if it is the best so far. The others are as of `LoopSettings`."""
        self.history.append((self.step, value))
        better = value < self.best
        if better:
            self.best, self.best_step = value, self.step
        since = sum(step > self.best_step for step, _ in self.history)
        if not math.isfinite(value) or value > diverged * max(self.first, _NOISE):
            self.ended = f"it diverged: at step {self.step} the held-out divergence was {value:.4g}"
        elif since >= patience:
            self.ended = f"the held-out divergence had not fallen for {since} measurements"
        return better


STATE = "state"
"""Name of the loop's state in a work folder."""


def rate(step: int, steps: int) -> float:
    """The learning rate of step `step`, from 0, as a share of the highest."""
    # Linear warm-up, then half a cosine to zero (Loshchilov and Hutter, SGDR, arXiv 1608.03983, without restarts).
    warm = max(1, min(math.ceil(WARM_UP * steps), MOST_WARM_UP))
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2


def order(count: int, step: int, batch: int, seed: int) -> Iterator[int]:
    """The samples of step `step`, from 0: all of `count` once in an order that is drawn, then all in another, and so on."""
    drawn: dict[int, list[int]] = {}
    for place in range(step * batch, (step + 1) * batch):
        turn, at = divmod(place, count)
        if turn not in drawn:
            # A permutation an epoch, of the seed and the epoch alone: a run that goes on draws none before it anew.
            random = torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)
            drawn[turn] = torch.randperm(count, generator=random).tolist()
        yield drawn[turn][at]


def train(
    trained: dict[str, Tensor],
    samples: int,
    settings: LoopSettings,
    *,
    backward: Callable[[int, float], float],
    held_out: Callable[[], float],
    changed: Callable[[int], None] = lambda step: None,
    work: WorkFolder,
    progress: Progress = silent,
) -> tuple[TrainLog, dict[str, Tensor]]:
    """Run the loop, from the state that `work` keeps of an interrupted run if it has one.

    Args:
        trained: name -> float32 tensor, a leaf that gets a gradient; at the end they are where the run ended.
        samples: how many there are to train on.
        backward: called with a sample's number and a factor; adds the gradient of factor times its loss to `trained`, and
            returns the loss.
        held_out: measures the divergence of the held-out samples, in nats; the same number in all workers.
        changed: called with the number of steps done after the values of `trained` have changed, and before anything is run
            with them.
        progress: called with (label, done, total).

    Returns:
        How it went, and the values of `trained` at the best measurement; none where that is the one before training.
    """
    loop = _Loop(trained, settings)
    if work.has(STATE):
        with work.opened(STATE) as file:
            kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            log, best = loop.restore(kept, json.loads(file.metadata()["log"]))
        changed(log.step)
    else:
        log, best = TrainLog(held_out()), dict[str, Tensor]()
        if not math.isfinite(log.first):
            log.ended = f"the held-out divergence was {log.first:g} before training"
    while log.step < settings.steps and not log.ended:
        chosen = list(order(samples, log.step, settings.batch, settings.seed))
        losses = [backward(index, 1 / settings.batch) for index in distributed.shard(chosen)]
        if not math.isfinite(loop.added_up(sum(losses))) or not loop.update(log.step):
            log.ended = f"it diverged: at step {log.step + 1} the loss or its gradient was not finite"
            break
        log.step += 1
        changed(log.step)
        if log.step % settings.every == 0 or log.step == settings.steps:
            if log.record(held_out(), settings.patience, settings.diverged):
                best = {name: tensor.detach().cpu().clone() for name, tensor in trained.items()}
            if distributed.is_main():
                work.write(STATE, loop.state(best), {"log": json.dumps(dataclasses.asdict(log))})
        progress(settings.label, log.step, settings.steps)
    return log, best


class _Loop:
    """The tensors with their optimizer."""

    def __init__(self, trained: dict[str, Tensor], settings: LoopSettings) -> None:
        self.trained, self.settings = trained, settings
        self.optimizer = torch.optim.AdamW(list(trained.values()), lr=settings.lr, weight_decay=0.0)
        self.optimizer.zero_grad()

    def added_up(self, loss: float) -> float:
        """Give each tensor the sum of all workers' gradients, in one exchange, and return the sum of their losses."""
        if distributed.world_size() == 1:
            return loss
        tensors = list(self.trained.values())
        facts = torch.tensor([*(float(leaf.grad is not None) for leaf in tensors), loss], device=tensors[0].device)
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in tensors]
        flat = distributed.all_sum(torch.cat([*(leaf.flatten() for leaf in grads), facts]))
        *sums, summed = flat.split([*(leaf.numel() for leaf in grads), len(facts)])
        for tensor, grad, has in zip(tensors, sums, summed.tolist(), strict=False):
            tensor.grad = grad.view_as(tensor) if has else None  # what no worker's loss depends on has none
        return float(summed[-1])

    def update(self, step: int) -> bool:
        """Do a step with the gradients that there are, and forget them; nothing is changed where one is not finite."""
        # A norm that is not finite scales all gradients to NaN, so the step is not done and the run ends.
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        finite = bool(norm.isfinite())
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * rate(step, self.settings.steps)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return finite

    def state(self, best: dict[str, Tensor]) -> dict[str, Tensor]:
        """All tensors that a run needs to go on, and the best values."""
        tensors = {f"best/{name}": tensor for name, tensor in best.items()}
        for name, tensor in self.trained.items():
            tensors[f"now/{name}"] = tensor.detach().cpu().clone()
            moments = self.optimizer.state.get(tensor) or {}  # one that nothing depends on never has any
            tensors |= {f"{key}/{name}": moments[key].cpu() for key in _MOMENTS if moments}
        return tensors

    def restore(self, state: dict[str, Tensor], facts: dict[str, Any]) -> tuple[TrainLog, dict[str, Tensor]]:
        """Take up what `state` gave; return how it went until then, and the best values. UserError: it is damaged."""
        schema.check_value(TrainLog, facts, "the state of the interrupted run", "begin anew with --restart")
        for name, tensor in self.trained.items():
            with torch.no_grad():
                tensor.copy_(state[f"now/{name}"])
            if f"step/{name}" not in state:
                continue
            moments = {key: state[f"{key}/{name}"] for key in _MOMENTS}
            self.optimizer.state[tensor] = {
                key: moment.clone() if key == "step" else moment.to(tensor.device, copy=True)
                for key, moment in moments.items()
            }
        best = {name.removeprefix("best/"): moment for name, moment in state.items() if name.startswith("best/")}
        return TrainLog(**facts), best

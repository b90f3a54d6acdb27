"""The training loop: AdamW on some tensors, evaluated on held-out samples; the best state is kept.

The learning rate rises over the first steps and then falls to zero as a cosine. Gradients are clipped to a norm of 1. Every
few steps the divergence of the held-out samples is measured. The loop ends early if that has not improved for `patience`
measurements, or if training diverges: a loss that is not finite, or a held-out divergence above `DIVERGED` times the first
one. The loop's state is stored at each measurement, and a run resumed from there gives identical bits.

Several workers (`utils.distributed`) share out the samples of a step, and their gradients are summed: the same step as with
one worker, up to the order of sums. Each worker updates its own copy of the tensors identically; the first one stores the
state.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlmcompress.utils import distributed, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent
from vlmcompress.utils.work_folder import WorkFolder

PATIENCE = 4
"""Default number of consecutive measurements without improvement after which the loop ends."""
DIVERGED = 2.0
WARM_UP = 0.1  # share of the steps for warm-up
MOST_WARM_UP = 20  # steps
STATE = "state"
"""File name of the loop's state in a work folder."""
_NOISE = 1e-4  # nats; a smaller divergence is rounding error
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class LoopSettings:
    """Settings of a loop.

    Attributes:
        steps: most steps.
        batch: samples per step.
        lr: the highest learning rate.
        every: steps between two measurements of the held-out samples.
        seed: seed of the order of samples.
        label: label of the progress bar.
        patience: number of consecutive measurements without improvement after which the loop ends.
        diverged: a held-out divergence of this many times the first one ends the loop.
    """

    steps: int
    batch: int
    lr: float
    every: int
    seed: int
    label: str = "training"
    patience: int = PATIENCE
    diverged: float = DIVERGED

    @classmethod
    def of(cls, flags: Any, seed: int, **others: Any) -> LoopSettings:
        """The settings from a command's flags (`steps`, `batch`, `lr`, `every`); `others`: further attributes."""
        return cls(flags.steps, flags.batch, flags.lr, flags.every, seed, **others)


def require_flags(training: Any, *counts: str) -> None:
    """Raise UserError if one of the flags named in `counts` is below 1, or `lr` is not between 0 and 1."""
    for name in counts:
        if getattr(training, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(training, name)}; it should be at least 1")
    if not 0 < training.lr < 1:
        raise UserError(f"--lr is {training.lr:g}; it should be above 0 and below 1, such as 1e-4")


@dataclass
class TrainLog:
    """Progress of a run so far.

    Attributes:
        first: divergence of the held-out samples before training, in nats.
        step: number of steps done.
        best, best_step: the lowest divergence so far and its step; 0: before training.
        history: (step, divergence) of each measurement.
        ended: why the run ended before its last step, for messages; None: it did not.
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

    def record(self, value: float, patience: int, diverged: float) -> bool:
        """Record the held-out divergence after `step`; returns whether it is the best so far. Other arguments as in
        `LoopSettings`."""
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


def learning_rate(step: int, steps: int) -> float:
    """The learning rate at `step`, counted from 0, as a share of the highest rate."""
    # Linear warm-up, then half a cosine to zero (Loshchilov and Hutter, SGDR, arXiv 1608.03983, without restarts).
    warm = max(1, min(math.ceil(WARM_UP * steps), MOST_WARM_UP))
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2


def order(count: int, step: int, batch: int, seed: int) -> Iterator[int]:
    """Indices of the samples of `step`, counted from 0: each epoch visits all `count` samples in a new random order."""
    drawn: dict[int, list[int]] = {}
    for place in range(step * batch, (step + 1) * batch):
        turn, at = divmod(place, count)
        if turn not in drawn:
            # One permutation per epoch, from seed and epoch only: a resumed run need not repeat earlier draws.
            random = torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)
            drawn[turn] = torch.randperm(count, generator=random).tolist()
        yield drawn[turn][at]


Loss = Callable[[int], Tensor | None]
"""The loss of a sample by its number, a scalar: without a gradient where it trains nothing, None where it has none."""


@torch.no_grad()
def mean_loss(loss: Loss, samples: Sequence[int]) -> float:
    """The mean loss of the samples that have one, over all workers, without a graph."""
    values = [float(value) for index in distributed.shard(samples) if (value := loss(index)) is not None]
    # Workers have different numbers of samples: the mean is over all of them, not of the workers' means.
    return distributed.all_sum_float(sum(values)) / max(distributed.all_sum_float(len(values)), 1)


def train(
    trained: dict[str, Tensor],
    samples: int,
    settings: LoopSettings,
    *,
    loss: Loss,
    held_out: Callable[[], float],
    changed: Callable[[int], None] = lambda step: None,
    work: WorkFolder,
    progress: Progress = silent,
) -> tuple[TrainLog, dict[str, Tensor]]:
    """Run the loop, resuming from the state in `work` if there is one.

    Args:
        trained: name -> float32 leaf tensor that requires a gradient; updated in place.
        samples: number of training samples.
        loss: the loss of a training sample by its number.
        held_out: measures the divergence of the held-out samples, in nats (`mean_loss`); the same number in all workers.
        changed: called with the number of steps done after `trained` was updated, before the model runs again.
        progress: called with (label, done, total).

    Returns:
        The log, and the values of `trained` at the best measurement; empty if that was before training.
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
        total = 0.0
        for index in distributed.shard(chosen):
            with torch.enable_grad():
                value = loss(index)
                # All workers take part in the step's sum of gradients, also one whose samples train nothing.
                if value is not None and value.requires_grad:
                    (value * (1 / settings.batch)).backward()
            total += 0.0 if value is None else float(value.detach())
        if not math.isfinite(loop.added_up(total)) or not loop.update(log.step):
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
            tensor.grad = grad.view_as(tensor) if has else None  # None if no worker's loss depends on it
        return float(summed[-1])

    def update(self, step: int) -> bool:
        """Do a step and clear the gradients; returns False and changes nothing if a gradient is not finite."""
        # With a norm that is not finite clipping would turn all gradients into NaN, so the run ends without the step.
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        finite = bool(norm.isfinite())
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * learning_rate(step, self.settings.steps)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return finite

    def state(self, best: dict[str, Tensor]) -> dict[str, Tensor]:
        """All tensors needed to resume a run, including the best values."""
        tensors = {f"best/{name}": tensor for name, tensor in best.items()}
        for name, tensor in self.trained.items():
            tensors[f"now/{name}"] = tensor.detach().cpu().clone()
            moments = self.optimizer.state.get(tensor) or {}  # a tensor without gradients has none
            tensors |= {f"{key}/{name}": moments[key].cpu() for key in _MOMENTS if moments}
        return tensors

    def restore(self, state: dict[str, Tensor], facts: dict[str, Any]) -> tuple[TrainLog, dict[str, Tensor]]:
        """Restore what `state` returned; returns the log and the best values.

        Raises:
            UserError: the log is damaged.
            KeyError: a tensor is missing; `WorkFolder.opened` tells users so.
        """
        schema.require_value(TrainLog, facts, "the state of the interrupted run", "begin anew with --restart")
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

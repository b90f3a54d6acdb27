"""The loop: when it stops, what it keeps, the order of samples, and that an interrupted run comes to the same bits."""

from __future__ import annotations

import functools
import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from vlmcompress.training.train_loop import (
    DIVERGED,
    PATIENCE,
    LoopSettings,
    TrainLog,
    learning_rate,
    mean_loss,
    order,
    train,
)
from vlmcompress.utils.work_folder import WorkFolder


class Breaking(WorkFolder):
    """A work folder that breaks off a run after its n-th state."""

    breaks: int | None = None

    def write(self, name, tensors, metadata=None):
        super().write(name, tensors, metadata)
        if self.breaks is not None:
            self.breaks -= 1
            if not self.breaks:
                raise KeyboardInterrupt


def kept(folder: Path, breaks: int | None = None) -> Breaking:
    work = Breaking(folder / "out")
    work.begin({"breaks": breaks})
    work.breaks = breaks
    return work


def noted(*values: float, first: float = 1.0) -> tuple[TrainLog, list[bool]]:
    log, better = TrainLog(first), []
    for value in values:
        log.step += 25
        better.append(log.record(value, PATIENCE, DIVERGED))
    return log, better


def test_the_best_measurement_is_known():
    log, better = noted(0.9, 0.5, 0.6, 0.4, 0.41)
    assert better == [True, True, False, True, False]
    assert (log.best, log.best_step, log.ended) == (0.4, 100, None)


def test_training_ends_when_the_loss_stops_falling():
    log, _ = noted(0.5, *[0.6] * (PATIENCE - 1))
    assert log.ended is None
    log, _ = noted(0.5, *[0.6] * PATIENCE)
    assert log.ended == f"the held-out divergence had not fallen for {PATIENCE} measurements"
    log, better = noted(*[1.1] * PATIENCE)
    assert log.ended and log.best_step == 0 and not any(better)


@pytest.mark.parametrize("value", [2.1, math.nan, math.inf])
def test_divergence_ends_training(value):
    log, better = noted(0.5, value)
    assert log.ended.startswith("it diverged: at step 50") and better == [True, False] and log.best == 0.5


def test_a_nan_divergence_trains_nothing(tmp_path):
    """Otherwise any later number would be better than the first, and `held_out_kl` would be no JSON."""
    weight, called = torch.ones(2, requires_grad=True), []
    log, best = train(
        {"w": weight},
        4,
        LoopSettings(4, 2, 0.1, 2, 0),
        loss=lambda index: called.append(index),
        held_out=lambda: math.nan,
        changed=lambda step: None,
        work=kept(tmp_path),
    )
    assert log.ended == "the held-out divergence was nan before training" and not best and not called


def test_every_sample_once_in_each_turn():
    visited = [index for step in range(15) for index in order(10, step, 4, seed=3)]
    turns = [visited[at : at + 10] for at in range(0, 60, 10)]
    assert all(sorted(turn) == list(range(10)) for turn in turns) and len(set(map(tuple, turns))) == 6
    assert visited == [index for step in range(15) for index in order(10, step, 4, seed=3)]
    assert visited[:10] != list(islice((i for step in range(3) for i in order(10, step, 4, seed=4)), 10))


def test_the_rate_rises_and_falls():
    rates = [learning_rate(step, 100) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and max(rates) == 1.0 and 0 < rates[-1] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)


def fitted(work: WorkFolder, steps: int = 40, lr: float = 0.05, broken: float | None = None):
    """Fit a line to points that lie on one; a measurement is its error on others."""
    torch.manual_seed(0)
    x, true = torch.randn(24, 5), torch.randn(5)
    y = x @ true
    trained = {"w": torch.zeros(5, requires_grad=True), "unused": torch.zeros(2, requires_grad=True)}

    def loss(index: int) -> torch.Tensor | None:
        """Every eighth sample has none."""
        value = (x[index] @ trained["w"] - y[index]).square()
        return None if index % 8 == 7 else value if broken is None or index >= 16 else value * broken

    settings = LoopSettings(steps, batch=3, lr=lr, every=5, seed=1)
    measured = [float((x[index] @ trained["w"].detach() - y[index]).square()) for index in range(16, 23)]
    assert mean_loss(loss, range(16, 24)) == pytest.approx(sum(measured) / 7)
    held_out = functools.partial(mean_loss, loss, range(16, 24))
    return train(trained, 16, settings, loss=loss, held_out=held_out, work=work), trained


def test_training_learns_and_keeps_the_best(tmp_path):
    (log, best), trained = fitted(kept(tmp_path))
    assert log.step == 40 and log.best < 0.5 * log.first and log.ended is None
    assert log.best == min(value for _, value in log.history)
    assert set(best) == set(trained) and best["w"].abs().sum() > 0 and not best["unused"].any()


@pytest.mark.parametrize("breaks", [1, 3, 8])
def test_an_interrupted_run_continues_to_the_same_bits(tmp_path, breaks):
    (whole, best), trained = fitted(kept(tmp_path / "whole"))
    work = kept(tmp_path, breaks)
    with pytest.raises(KeyboardInterrupt):
        fitted(work)
    work.breaks = None
    (log, resumed), now = fitted(work)
    assert log == whole
    assert all(torch.equal(resumed[name], best[name]) and torch.equal(now[name], trained[name]) for name in best)


def test_an_infinite_loss_ends_training(tmp_path):
    (log, best), trained = fitted(kept(tmp_path), broken=math.nan)
    assert log.ended == "it diverged: at step 1 the loss or its gradient was not finite"
    assert best == {} and not trained["w"].detach().any()

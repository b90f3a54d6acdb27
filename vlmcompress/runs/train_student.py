"""The training of a recovery: what is asked for, the loop over a student that is in place, and what the manifest says of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.calibration import distillation
from vlmcompress.common import distributed
from vlmcompress.common.progress import Progress
from vlmcompress.data.encode import Encoded
from vlmcompress.errors import UserError, did_you_mean
from vlmcompress.models import VLM
from vlmcompress.runs import objective
from vlmcompress.runs.recovery_files import RecoveryFiles
from vlmcompress.runs.teacher_cache import LEAST_HELD_OUT, Data
from vlmcompress.runs.train_loop import Course, Settings, train
from vlmcompress.runs.trained_tensors import PARTS, Trained, put

SCALES = "scales"
BESIDE = ("projector", "norms")
"""Parts that can be trained together with the scales of a quantized checkpoint."""


@dataclass(frozen=True)
class Asked:
    """What is trained, and how: the flags of the verb.

    Raises:
        UserError: a value is not right.
    """

    train: tuple[str, ...] = ("projector", "norms", "lora")
    rank: int = 8
    steps: int = 300
    batch: int = 4
    lr: float = 2e-4
    every: int = 25

    def __post_init__(self) -> None:
        for name in self.train:
            if name not in PARTS:
                raise UserError(f"--train: no part '{name}'{did_you_mean(name, PARTS)}")
            if SCALES in self.train and name not in (SCALES, *BESIDE):
                raise UserError(
                    f"--train {name}: beside {SCALES} only {' and '.join(BESIDE)} can be trained, leave it out"
                )
        for name in ("rank", "steps", "batch", "every"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}; it should be at least 1")
        if not 0 < self.lr < 1:
            raise UserError(f"--lr is {self.lr:g}; it should be above 0 and below 1, such as 1e-4")

    @property
    def samples(self) -> int:
        """As many samples as are seen once each, with those that are held out."""
        trained = self.steps * self.batch
        return trained + max(LEAST_HELD_OUT, -(-trained // 9))  # a tenth of all is held out


@dataclass(frozen=True)
class Student:
    """What is trained.

    Attributes:
        vlm: the model, on its device.
        names: of the parameters that the checkpoint has.
        batches: the samples, the held-out ones at the end.
        held_out: how many these are.
        attached: a context in which the model runs behind its reducer.
    """

    vlm: VLM
    names: Collection[str]
    batches: Encoded
    held_out: int
    attached: Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Found:
    """What training came to.

    Attributes:
        changed: parameter -> its new value; none where nothing is better than before.
        after: divergence of the held-out samples with these, in nats.
        counts: part -> how many numbers of it were trained.
    """

    course: Course
    changed: dict[str, Tensor]
    after: float
    counts: dict[str, int]


def trained(student: Student, training: Asked, seed: int, files: RecoveryFiles, progress: Progress) -> Found:
    """Train a model behind its reducer, and leave it as the best measurement had it, merged; or as it was."""
    vlm, batches = student.vlm, student.batches
    first = len(batches) - student.held_out
    with distributed.shared_errors():
        parts = Trained(vlm, training.train, training.rank, seed, student.names)

    def loss(index: int) -> Tensor:
        return objective.divergence(files.targets(index), distillation.student_logits(vlm, batches[index]))

    def backward(index: int, factor: float) -> float:
        with distillation.graph(vlm):
            divergence = loss(index)
            if divergence.requires_grad:  # the projector has no part in a sample of text alone
                (divergence * factor).backward()
        return float(divergence.detach())

    def measured() -> float:
        with torch.no_grad():
            divergence = sum(float(loss(index)) for index in distributed.shard(range(first, len(batches))))
        return distributed.all_sum_float(divergence) / student.held_out

    settings = Settings(training.steps, training.batch, training.lr, training.every, seed)
    callbacks: dict[str, Any] = {"backward": backward, "held_out": measured, "changed": lambda step: parts.changed()}
    with torch.inference_mode(False), student.attached():
        with parts.attached():
            course, best = train(parts.tensors, first, settings, **callbacks, store=files, progress=progress)
        if not math.isfinite(course.first):
            raise UserError(f"there is nothing to start from: {course.ended}; keep more, or choose another reducer")
        changed = parts.merged(best) if best else {}
        put(vlm.model, changed)
        after = measured() if changed else course.first
    if after < course.first:
        return Found(course, changed, after, parts.counts)
    return Found(course, {}, course.first, parts.counts)  # also where rounding to the model's type undid it


def facts(training: Asked, outcome: Found, data: Data) -> dict[str, Any]:
    """What the manifest says of a recovery."""
    course = outcome.course
    return {
        "settings": asdict(training) | {"train": list(training.train)},
        "parameters": outcome.counts,
        "objective": f"KL(teacher || student) at answer tokens, of the teacher's {objective.TOP} most likely tokens "
        f"and the rest together; of all tokens where the vocabulary has at most {objective.WHOLE}",
        "samples": {
            "trained_on": len(data.samples) - data.held_out,
            "held_out": data.held_out,
            "answers_of_the_teacher": data.written,
        },
        "held_out_kl": {
            "before": course.first,
            "after": outcome.after,
            "unit": "nats per answer token, mean over samples",
        },
        "steps": course.step,
        "best_step": course.best_step if outcome.changed else 0,
        "history": [list(measurement) for measurement in course.history],
        "ended": course.ended,
        "changed": bool(outcome.changed),
    }

"""The training of `recover`: the command's options, the trained tensors, the training itself, and its part of the manifest.

A parameter of a 16-bit model has a float32 master copy: gradients accumulate there, the optimizer updates it, and the model
gets it rounded. Linear layers of the language model have adapters (`training.lora`) and do not change until these are merged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data.encode import Encoded
from vlmcompress.training import distillation, lora, teacher_cache
from vlmcompress.training.teacher_cache import TrainingData
from vlmcompress.training.train_loop import LoopSettings, TrainLog, mean_loss, require_flags, train
from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.progress import Progress
from vlmcompress.utils.work_folder import WorkFolder


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained, and how: the command's flags.

    Raises:
        UserError: a value is invalid.
    """

    train: tuple[str, ...] = ("projector", "norms", "lora")
    steps: int = 300
    batch: int = 4
    lr: float = 2e-4
    every: int = 25

    def __post_init__(self) -> None:
        for name in self.train:
            if name not in PARTS:
                raise UserError(f"--train: no part '{name}'{did_you_mean(name, PARTS)}")
        require_flags(self, "steps", "batch", "every")


@dataclass(frozen=True)
class TrainingOutcome:
    """Result of the training.

    Attributes:
        changed: parameter -> its new value; empty if nothing improved.
        after: divergence of the held-out samples with these values, in nats.
        counts: part -> number of trained weights.
    """

    log: TrainLog
    changed: dict[str, Tensor]
    after: float
    counts: dict[str, int]


def train_student(
    vlm: VLM,
    names: Collection[str],
    batches: Encoded,
    held_out: int,
    training: TrainingOptions,
    seed: int,
    work: WorkFolder,
    progress: Progress,
) -> TrainingOutcome:
    """Train a model, on its device and with its reducer attached; it is left in its best state, with adapters merged, or
    unchanged.

    Args:
        names: names of the parameters in the checkpoint; others are not trained.
        batches: the samples, the `held_out` ones at the end; their targets are in `work`.
    """
    first = len(batches) - held_out
    with distributed.shared_errors():
        parts = Trained(vlm, training.train, seed, names)

    def loss(index: int) -> Tensor:
        return teacher_cache.teacher_divergence(
            teacher_cache.targets(work, index), distillation.student_logits(vlm, batches[index])
        )

    def measured() -> float:
        return mean_loss(loss, range(first, len(batches)))

    with torch.inference_mode(False):
        with parts.attached():
            log, best = train(
                parts.tensors,
                first,
                LoopSettings.of(training, seed),
                loss=loss,
                held_out=measured,
                changed=lambda step: parts.changed(),
                graph=lambda: distillation.graph(vlm),
                work=work,
                progress=progress,
            )
        if not math.isfinite(log.first):
            raise UserError(f"there is nothing to start from: {log.ended}; keep more, or choose another reducer")
        changed = parts.merged(best) if best else {}
        put(vlm.model, changed)
        # Measured as it will be written: rounded to the model's dtype, adapters merged.
        after = measured() if changed else log.first
    if after < log.first:
        return TrainingOutcome(log, changed, after, parts.counts)
    # also if rounding to the model's dtype undid the improvement
    return TrainingOutcome(log, {}, log.first, parts.counts)


def recovery_facts(training: TrainingOptions, outcome: TrainingOutcome, data: TrainingData) -> dict[str, Any]:
    """The manifest's entry about the training."""
    log = outcome.log
    return {
        "settings": asdict(training) | {"train": list(training.train)},
        "parameters": outcome.counts,
        "objective": f"KL(teacher || student) at answer tokens, of the teacher's {teacher_cache.TOP} most likely tokens "
        f"and the rest together; of all tokens where the vocabulary has at most {teacher_cache.WHOLE}",
        "samples": data.counts,
        "held_out_kl": {
            "before": log.first,
            "after": outcome.after,
            "unit": "nats per answer token, mean over samples",
        },
        "steps": log.step,
        "best_step": log.best_step if outcome.changed else 0,
        "history": [list(measurement) for measurement in log.history],
        "ended": log.ended,
        "changed": bool(outcome.changed),
    }


PARTS = {
    "projector": "projector",
    "norms": "norms of the language model",
    "lora": "adapters of the language model",
    "tower": "vision tower",
}
"""Part that can be trained -> its description."""
RANK = 8
"""Rank of the adapters."""


class Trained:
    """The trained tensors of a model.

    Args:
        vlm: the model, on the device that it is trained on.
        parts: names of `PARTS`.
        seed: seed of the adapters' initial values.
        stored: names of the parameters in its checkpoint; others are not trained.

    Raises:
        UserError: the model has no parameters of a part.
    """

    def __init__(self, vlm: VLM, parts: Collection[str], seed: int, stored: Collection[str]) -> None:
        self.model = vlm.model
        self.counts: dict[str, int] = {}
        self.masters: dict[str, Tensor] = {}
        self.adapters: dict[str, Tensor] = {}
        for part in PARTS:
            if part not in parts:
                continue
            if part == "lora":
                groups = models.resolve_groups(vlm.model, vlm.spec)
                linears = [name for group in groups for name in group.linears if f"{name}.weight" in stored]
                shapes = {name: tuple(vlm.model.get_parameter(f"{name}.weight").shape) for name in linears}
                adapters = lora.create_adapters(shapes, RANK, seed)  # type: ignore[arg-type]
                self.adapters = tensors = {name: tensor.to(vlm.model.device) for name, tensor in adapters.items()}
            else:
                # A parameter counts once, in the first part that has it.
                names = [name for name in _names(vlm, part) if name in stored and name not in self.masters]
                tensors = {name: vlm.model.get_parameter(name).detach().float().clone() for name in names}
                self.masters |= tensors
            if not tensors:
                raise UserError(f"--train {part}: the model has no {PARTS[part]} to train; leave it out")
            self.counts[part] = sum(tensor.numel() for tensor in tensors.values())
        for tensor in self.tensors.values():
            tensor.requires_grad_()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All trained tensors, by name of the parameter or of the adapter's matrix."""
        return self.masters | self.adapters

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Within the context the model computes with the trained tensors, and a backward pass accumulates their gradients."""
        with contextlib.ExitStack() as stack:
            for name, master in self.masters.items():
                parameter = self.model.get_parameter(name).requires_grad_()
                stack.callback(parameter.requires_grad_, False)
                stack.callback(parameter.register_post_accumulate_grad_hook(self._gradient_mover(master)).remove)
            stack.enter_context(lora.attached(self.model, self.adapters))
            yield

    @torch.no_grad()
    def changed(self) -> None:
        """Copy the masters' current values to the model, rounded to its dtype."""
        for name, master in self.masters.items():
            self.model.get_parameter(name).copy_(master)

    def _gradient_mover(self, master: Tensor) -> Callable[[Tensor], None]:
        """A hook that moves a parameter's gradient to its master."""

        def move(parameter: Tensor) -> None:
            assert parameter.grad is not None
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            parameter.grad = None

        return move

    @torch.no_grad()
    def merged(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's parameters for some values of `tensors`: name -> tensor in the parameter's dtype, on its device."""
        merged = {}
        for name in self.masters:
            parameter = self.model.get_parameter(name)
            merged[name] = values[name].to(parameter.device, parameter.dtype)
        for layer in lora.adapted_layers(self.adapters):
            weight = self.model.get_parameter(f"{layer}.weight")
            down, up = (values[f"{layer}.{end}"].to(weight.device) for end in (lora.DOWN, lora.UP))
            merged[f"{layer}.weight"] = lora.merge_adapter(weight, down, up)
        return merged


def put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set parameters of a model in place."""
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)


def _names(vlm: VLM, part: str) -> list[str]:
    """Names of the parameters of a part, without adapters."""
    spec = vlm.spec
    projector = (*spec.projector, *spec.images.newlines)
    names = [name for name, parameter in vlm.model.named_parameters() if parameter.is_floating_point()]
    if part == "norms":
        text = spec.layers.rpartition(".")[0]
        names = [name for name in names if _below(name, (text,))]
        owners = {name: type(vlm.model.get_submodule(name.rpartition(".")[0])).__name__ for name in names}
        return [name for name in names if "norm" in owners[name].lower()]
    if part == "projector":
        return [name for name in names if _below(name, projector)]
    return [name for name in names if _below(name, spec.vision) and not _below(name, projector)]


def _below(name: str, roots: Collection[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)

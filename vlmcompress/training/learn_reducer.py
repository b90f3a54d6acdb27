"""Train the scorer of the reducer `learned` on calibration images, with the unreduced model as teacher.

The model's weights do not change. Its next-token distributions at the answers are computed once and stored on disk; then the
scorer is trained to keep them close when the model sees only the selected tokens (`hooks.gated`). Held-out samples measure
the selection itself, without noise. No labels are needed: data without answers get the model's own. Several workers
(`utils.distributed`) share out the samples, and the first one writes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data.encode import Encoded
from vlmcompress.quantization.plan.calibration_data import data_source
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.hooks import gated
from vlmcompress.reduction.hooks.gated import Gate, Gated
from vlmcompress.reduction.methods import REGISTRY, Grid, Signals, learned, reduce, too_small
from vlmcompress.reduction.support import family_problem
from vlmcompress.training import distillation, teacher_cache
from vlmcompress.training.train_loop import LoopSettings, TrainLog, mean_loss, require_flags, train
from vlmcompress.utils import distributed, folders, hub, identity
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, phase, phase_seconds, silent, timed_phases
from vlmcompress.utils.work_folder import WorkFolder, locked_output

HIDDEN = 64
"""Width of the network."""
MEASURED = 64
"""Number of samples on which mean and standard deviation of the channels are measured."""
TEMPERATURES = (0.5, 0.3)
"""Temperature of the soft selection at the first and the last step, in standard deviations of an image's scores."""
NOISE = 0.3
"""Standard deviation of the noise added to scores in training, in the same units."""
SPREAD, MOST = 2.25, 0.9
"""The share to keep is drawn log-uniformly from `keep / SPREAD` to `keep * SPREAD` (at most `MOST`), or from `keep` to `to`:
trained at a single share, a scorer orders tokens well at that threshold only."""
PATIENCE, DIVERGED = 6, 4.0
COMPARED = ("uniform", "coverage")
"""Training-free reducers that the result is compared with."""


@dataclass(frozen=True)
class ScorerTraining:
    """How a scorer is trained: the command's flags. Raises UserError for an invalid value."""

    keep: float = 0.25
    steps: int = 600
    batch: int = 16
    lr: float = 1e-3
    every: int = 50
    to: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise UserError(f"--keep is {self.keep:g}; it should be above 0 and below 1, such as 0.25")
        if self.to is not None and not self.keep < self.to < 1:
            raise UserError(f"--to is {self.to:g}; it should be above --keep, {self.keep:g}, and below 1, such as 0.75")
        require_flags(self, "steps", "batch", "every")

    def share(self, place: float) -> float:
        """The share to train at, for a position from 0 (smallest) to 1 (largest) in the range of shares."""
        if self.to is not None:
            return self.keep * (self.to / self.keep) ** place
        return min(MOST, self.keep * SPREAD ** (2 * place - 1))

    def judged(self) -> tuple[float, ...]:
        """The shares at which the scorer is measured: `keep`, or both ends and the middle of the range."""
        return (self.keep,) if self.to is None else tuple(self.share(place) for place in (0.0, 0.5, 1.0))


def learn_reducer(
    recipe: Recipe,
    training: ScorerTraining,
    *,
    restart: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a scorer for `recipe.model` and write it to the file `recipe.out`; return the facts stored in that file.

    Args:
        recipe: resolved recipe of scheme `none`; its model, data and seed are used.
        training: how it is trained.
        restart: discard the finished work of an interrupted run, which is reused otherwise.
        overwrite: replace an existing file.
        progress: called with (label, done, total).

    Raises:
        UserError: bad input, or no improvement; nothing is written then.
    """
    out = recipe.output
    claim = locked_output(out, functools.partial(_require_output, recipe, out, overwrite), restart=restart)
    with timed_phases(), claim as work:
        source = data_source(recipe, recipe.model, "learn-reducer")
        assert source is not None
        with phase("loading"):
            samples = teacher_cache.read_samples(source, recipe, reduced=True)
            settings = teacher_cache.training_settings("learn-reducer", recipe, training, samples, {})
        with distributed.process_group():
            work.begin(settings)
            vlm, data, origin = teacher_cache.cache_teacher(recipe, source, samples, work, progress)
            vlm.model.requires_grad_(False)
            with phase("training"), torch.inference_mode(False):
                batches = Encoded(data.samples, vlm, max_length=recipe.calibrate.max_length)
                log, best, others = _Training(vlm, training, recipe.seed, work, batches, data.held_out).run(progress)
            why = f" ({log.ended})" if log.ended else ""
            failure = (
                f"nothing was learned: no measurement was better than an untrained scorer{why}; give more data, or"
            )
            distributed.raise_any(None if best else f"{failure} a lower --lr")
        facts = {
            "model_type": vlm.model.config.model_type,
            "source": hub.source_facts(recipe.model)["source"],
            "width": vlm.model.config.get_text_config().hidden_size,
            "hidden": HIDDEN,
            "keep": training.keep,
            "to": training.to,
            "training": asdict(training) | {"seed": recipe.seed},
            "samples": {"source": origin["source"], **data.counts},
            "held_out_kl": {"untrained": log.first, "learned": log.best, **others, "unit": "nats per answer token"},
            "steps": log.step,
            "best_step": log.best_step,
            "ended": log.ended,
            "created_by": identity.versions(),
        }
        if distributed.is_main():
            scorer_file.save_scorer(out, best, facts)
            work.remove()
        return facts | {"timing": phase_seconds()}


class _Training:
    """A run: the model with gates on its visual tokens, and the scorer's tensors."""

    def __init__(
        self, vlm: VLM, settings: ScorerTraining, seed: int, work: WorkFolder, batches: Encoded, held_out: int
    ) -> None:
        self.vlm, self.settings, self.seed, self.work, self.batches = vlm, settings, seed, work, batches
        self.first = len(batches) - held_out
        self.gated = Gated(vlm)
        self.step = 0
        self.weights: dict[str, Tensor] = {}

    def run(self, progress: Progress) -> tuple[TrainLog, dict[str, Tensor], dict[str, float]]:
        """Train; return the log, the best tensors, and the held-out divergence of the reducers `COMPARED`."""
        settings = self.settings
        with self.gated:
            mean, spread = self._spread()
            start = learned.initial(mean, spread, HIDDEN, self.seed)
            self.weights = {name: value.to(self.vlm.model.device) for name, value in start.items()}
            trained = {
                name: value.requires_grad_() for name, value in self.weights.items() if name not in learned.FIXED
            }
            others = {name: self._measured([_chosen_by(name, keep) for keep in settings.judged()]) for name in COMPARED}
            log, best = train(
                trained,
                self.first,
                LoopSettings.of(settings, self.seed, label="training the scorer", patience=PATIENCE, diverged=DIVERGED),
                loss=self._noisy_loss,
                held_out=lambda: self._measured([self._hard(keep) for keep in settings.judged()]),
                changed=self._changed,
                work=self.work,
                progress=progress,
            )
        fixed = {name: self.weights[name] for name in learned.FIXED} if best else {}
        return log, best | fixed, others

    def _changed(self, step: int) -> None:
        self.step = step

    def _loss(self, index: int, gate: Gate) -> Tensor:
        self.gated.gate = gate
        return teacher_cache.teacher_divergence(
            teacher_cache.targets(self.work, index), distillation.whole_logits(self.vlm, self.batches[index])
        )

    def _noisy_loss(self, index: int) -> Tensor:
        """A training sample's loss, with a soft gradient; share and noise are determined by its number, step and seed."""
        # Python's hash of integers is the same in every process: only those of strings and bytes are salted.
        random = torch.Generator().manual_seed(hash((self.seed, self.step, index)) % 2**63)
        first, last = TEMPERATURES
        temperature = first * (last / first) ** (self.step / self.settings.steps)
        share = self.settings.share(float(torch.rand((), generator=random)))

        def soft(features: Tensor, grid: Grid) -> Tensor:
            # Noisy scores select the tokens (perturbed top-k). The model sees this hard selection; the gradient is that of a
            # soft one (`gates`; straight-through, arXiv 1308.3432), which gets harder as the temperature falls.
            values = gated.standardize(learned.score(self.weights, features, grid))
            noise = NOISE * torch.randn(len(values), generator=random).to(values.device)
            best, cover = self._chosen(values.detach() + noise, features, grid, share)
            return gated.gates(values, best, temperature).index_fill(0, cover, 1.0)

        return self._loss(index, soft)

    def _hard(self, keep: float) -> Gate:
        """The gate that keeps the tokens chosen by the scorer."""

        def gate(features: Tensor, grid: Grid) -> Tensor:
            kept = torch.cat(self._chosen(learned.score(self.weights, features, grid), features, grid, keep))
            return torch.zeros(len(features), device=features.device).index_fill(0, kept, 1.0)

        return gate

    def _chosen(self, values: Tensor, features: Tensor, grid: Grid, keep: float) -> tuple[Tensor, Tensor]:
        """The tokens kept for their score, and those kept to cover the image."""
        reducer = learned.Learned(keep)
        return learned.choose(values, features, reducer.budget(grid), reducer.cover)

    def _measured(self, gates: Sequence[Gate]) -> float:
        """The mean divergence of the held-out samples that have images after each of `gates`, in nats."""
        images = list(self._with_images(range(self.first, len(self.batches))))
        return sum(mean_loss(functools.partial(self._loss, gate=gate), images) for gate in gates) / len(gates)

    @torch.no_grad()
    def _spread(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of the visual tokens of some samples, `[d]` each."""
        rows: list[Tensor] = []
        grids: set[Grid] = set()

        def note(features: Tensor, grid: Grid) -> Tensor:
            rows.append(features.float().cpu())
            grids.add(grid)
            return features.new_ones(len(features), dtype=torch.float32)

        for index in itertools.islice(self._with_images(range(self.first)), MEASURED):
            self.gated.gate = note
            distillation.whole_logits(self.vlm, self.batches[index])
        if all(too_small(learned.Learned(self.settings.keep), grid) for grid in grids):
            most = max(map(math.prod, grids))
            raise UserError(
                f"--keep {self.settings.keep:g} of these images, of at most {most} tokens, is less than one, so they would be "
                f"kept whole; give at least {1 / most:.2g}"
            )
        every = torch.cat(rows)
        return every.mean(0), every.std(0, correction=0)

    def _with_images(self, indices: Iterable[int]) -> Iterator[int]:
        """Those of the samples that have images."""
        return (index for index in indices if "pixel_values" in self.batches[index])


def _chosen_by(name: str, keep: float) -> Gate:
    """The gate that keeps the tokens of another reducer."""
    reducer = replace(REGISTRY.get(name), keep=keep)

    def gate(features: Tensor, grid: Grid) -> Tensor:
        kept = reduce(reducer, Signals(grid, features=features)).anchor
        return torch.zeros(len(features), device=features.device).index_fill(0, kept, 1.0)

    return gate


def _require_output(recipe: Recipe, out: Path, overwrite: bool) -> None:
    if out.suffix != ".safetensors":
        raise UserError(f"{out} has to be a scorer's file; give it a name that ends in .safetensors")
    folders.require_apart(recipe.model, out, "source model")  # an engine would take it for weights
    if out.is_dir():
        raise UserError(f"{out} is a folder; give another name for the scorer's file")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists already; choose another name, or add --overwrite")
    if out.exists() and not scorer_file.is_scorer(out):
        raise UserError(f"{out} is not a scorer, so it is not overwritten; choose another name")
    if reason := family_problem(models.spec_for(models.read_config(recipe.model)), "learned"):
        raise UserError(reason)

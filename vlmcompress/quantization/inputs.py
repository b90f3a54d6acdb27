"""What a run reads and learns before blocks are quantized: the model, samples and their origin, the reducer's numbers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress import models
from vlmcompress.export import adapter, rotate
from vlmcompress.export.convert import write_dequantized
from vlmcompress.models import VLM, Source
from vlmcompress.models.data import Reading, encode_usable, load_mixed, provenance, video
from vlmcompress.models.data.provenance import data_notes, token_counts
from vlmcompress.models.data.samples import Sample
from vlmcompress.models.data.sources import skipped_lines
from vlmcompress.models.devices import accelerated, accelerator
from vlmcompress.numerics.statistics.tokens import thinned
from vlmcompress.quantization.calibration.block_inputs import Refused
from vlmcompress.quantization.plan.calibration_data import data_reason, data_source, require_balance_data
from vlmcompress.quantization.plan.plan import Plan, rotation_problems
from vlmcompress.quantization.plan.visual_tokens import VisualTokens
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import scorer_file, threshold_file
from vlmcompress.reduction.choice import ReducerChoice, calibrated
from vlmcompress.reduction.hooks import learning, resizing
from vlmcompress.reduction.hooks.calibration_inputs import decoder, reduced
from vlmcompress.reduction.methods import TokenCounter
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils import distributed, hub, identity
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import note
from vlmcompress.utils.model_folder import adapter_files, weight_files
from vlmcompress.utils.progress import Progress, phase, silent
from vlmcompress.utils.work_folder import WorkFolder

Samples = Sequence[Mapping[str, Any]]
HELD_OUT = 8
"""Calibration samples for each further one that errors of layers are measured on."""


@dataclass(frozen=True)
class Inputs:
    """A loaded model and its calibration samples.

    Attributes:
        vlm: the model; after a reducer its decoder alone, with the same modules.
        samples: encoded samples (`models.data.encode`); empty if no block is run.
        held_out: further samples, on which errors of layers are measured; empty where the data have no more.
        origin: the manifest's description of the calibration data; None for no calibration.
        resize: the resizing of images, fitted to the samples' images; the model's processor applies it.
        names: the samples' names in messages.
    """

    vlm: VLM
    samples: list[dict[str, Tensor]]
    origin: dict[str, Any] | None
    resize: Resize | None = None
    names: Sequence[str] = ()
    held_out: Sequence[dict[str, Tensor]] = ()

    def reduced(self, reducer: ReducerChoice | None, progress: Progress = silent) -> Inputs:
        """The inputs of the decoder after a reducer; unchanged if there are no samples or no reducer before the decoder."""
        chosen = calibrated(reducer)
        if chosen is None or not self.samples or self.origin is None:
            return self
        with phase("reducing"):
            shorter = reduced(self.vlm, self.samples, chosen, progress)
            held_out = reduced(self.vlm, self.held_out, chosen, progress) if self.held_out else []
        origin = self.origin | token_counts(shorter) | {"reduce": scorer_file.carried(chosen).plain()}
        return Inputs(decoder(self.vlm), shorter, origin, self.resize, self.names, held_out)

    def counted(self, tokens: int, seed: int) -> Inputs:
        """The inputs with an origin that names how many tokens of each modality layers are fitted to, if not to all."""
        masks = thinned([sample["modality"] for sample in self.samples], tokens, seed)
        counts = token_counts([{"modality": mask} for mask in masks])["tokens"]
        if self.origin is None or not self.samples or counts == self.origin["tokens"]:
            return self
        return replace(self, origin=self.origin | {"fitted": counts})


@contextlib.contextmanager
def naming(names: Sequence[str]) -> Iterator[None]:
    """Context in which an error of the model on some samples names these samples."""
    try:
        yield
    except Refused as error:
        if not names:
            raise
        name, *others = [f"{names[number]}: the model raises ({why})" for number, why in error.reasons.items()]
        rest = f"; so it does for {len(others)} other{'s' * (len(others) > 1)}" if others else ""
        raise UserError(f"{name}; drop it{rest}") from error


@dataclass(frozen=True)
class Result:
    """The result of a finished run: the folder and its manifest."""

    out: Path
    manifest: dict


def read_inputs(
    recipe: Recipe, vlm: VLM, needed: str | None, progress: Progress = silent, *, hold_out: bool = False
) -> Inputs:
    """Encode the calibration samples for the model, if something needs them or the recipe names them.

    Args:
        needed: what needs samples, for the message if there are none; None: nothing does.
        progress: called with (label, done, total).
        hold_out: also read one sample more for each `HELD_OUT`, at least 4, if the data have so many, to measure errors on.
    """
    settings, reading = recipe.calibrate, Reading.of(recipe.calibrate)
    named = data_source(recipe, vlm.path, needed)
    if named is None:
        return Inputs(vlm, [], None, recipe.resize)
    source = hub.local(named, "dataset")
    mixed = hub.local(settings.text, "dataset") if settings.text else None
    with phase("encoding"):
        # Half of each kind where text is mixed in. The further ones are the next in the data's drawn order.
        kinds = 2 if mixed else 1
        count = settings.samples // kinds
        extra = kinds * max(-(-count // HELD_OUT), 4) if hold_out and count else 0  # of fewer an error says little
        samples, texts = load_mixed(source, mixed, samples=settings.samples + extra, seed=recipe.seed, reading=reading)
        if recipe.reduce:
            video.require_no_videos(samples)
        resize = fit_resize(recipe.resize, vlm, samples[:count])
        vlm = resizing.resized(vlm, resize) if resize else vlm
        options: dict[str, Any] = {"max_length": settings.max_length, "reading": reading, "progress": progress}
        every = [*samples, *texts]
        usable = encode_usable(every, vlm, Path(source).name, **options)
    fitted, held_out = dict[int, dict[str, Tensor]](), dict[int, dict[str, Tensor]]()
    for number, sample in zip(usable.numbers, usable.samples, strict=True):
        if (number if number < len(samples) else number - len(samples)) < count:
            fitted[number] = sample
        else:
            held_out[number] = sample
    origin = provenance(
        [samples[number] for number in fitted if number < len(samples)],
        [*fitted.values()],
        source,
        seed=recipe.seed,
        processor=vlm.processor,
        text=([texts[number - len(samples)] for number in fitted if number >= len(samples)], mixed) if mixed else None,
        requested=count * kinds if len(every) < count * kinds else None,
        skipped={**samples.skipped, **texts.skipped, **usable.skipped},
    )
    origin |= {"resize": resize.model_dump()} if resize else {}
    require_balance_data(recipe, origin["tokens"], source)
    for line in [*skipped_lines(usable.skipped), *data_notes(origin)]:
        note(line)
    origin |= {"held_out": len(held_out)} if hold_out else {}
    names = [every[number].name for number in [*fitted, *held_out]]
    return Inputs(vlm, [*fitted.values()], origin, resize, names, [*held_out.values()])


def read_for_plan(plan: Plan, progress: Progress) -> Inputs:
    """Load the plan's model, and encode the calibration samples if the run or the reducer needs them."""
    recipe = plan.recipe
    with phase("loading"):
        dtype = plan.source.float_type.dtype
        # Weights that no sample runs through are checked when they are rounded or copied, so that each is read once.
        check = plan.reads_data and bool(recipe.calibrate.data or data_reason(plan))
        options: dict[str, Any] = {"trust_remote_code": recipe.trust_remote_code, "check": check}
        vlm = models.load(plan.source.path, dtype=dtype, **options)
        vlm = replace(vlm, path=recipe.model)  # also if the weights are those of a derived model
    if plan.head:
        models.untie(vlm.model, vlm.spec)
    if not plan.reads_data:
        return Inputs(vlm, [], None, recipe.resize)
    inputs = read_inputs(recipe, vlm, data_reason(plan), progress, hold_out=plan.observes)
    prefix = "quantized" if plan.observes else None
    return replace(inputs, origin=inputs.origin and inputs.origin | {"prefix": prefix})


def fit_resize(resize: Resize | None, vlm: VLM, samples: Sequence[Sample]) -> Resize | None:
    """Replace the share of tokens in `resize` by the number of tokens per image that gives this share on the samples' images.
    A `resize` that has a number, or None, is returned unchanged."""
    if resize is None or resize.settled:
        return resize
    prompts = [tuple(image.size for image in sample.images) for sample in samples]
    return resizing.settle(vlm.spec, vlm.processor, prompts, resize)


def fit_reducer(reducer: ReducerChoice | None, vlm: VLM, samples: Samples, progress: Progress) -> ReducerChoice | None:
    """Return the reducer with all learned numbers in place, taken from a file that it names or learned from samples.

    Args:
        reducer: the recipe's reducer, or None.
        samples: encoded calibration samples; empty: the numbers come from the file that the reducer names.
        progress: called with (label, done, total).
    """
    if reducer is None:
        return None
    reducer = scorer_file.load_scorer(vlm.model.config, reducer)
    if not reducer.reducer.LEARNS:
        return reducer
    if not samples:
        return threshold_file.require_thresholds(vlm, reducer)
    with on_accelerator(vlm):
        return learning.learn_thresholds(vlm, samples, reducer, progress)


def fit_counter(
    tokens: VisualTokens | None, reducer: ReducerChoice | None, vlm: VLM, samples: Samples
) -> TokenCounter | None:
    """Fit to calibration samples how many tokens an image keeps, as a function of its pixels; None if nothing needs it.

    Args:
        tokens: the plan's description of the reducer.
        reducer: the reducer with all learned numbers in place.
    """
    if not (reducer and tokens and tokens.counted):
        return None
    with on_accelerator(vlm):
        return learning.counter(vlm, samples, reducer)


def on_accelerator(vlm: VLM) -> contextlib.AbstractContextManager[Any]:
    """The model on the accelerator, if there is one."""
    return accelerated(vlm.model, models.decoder_layers(vlm.model, vlm.spec))


def run_settings(command: str, recipe: Recipe) -> dict[str, Any]:
    """Settings that a run's results depend on and that are known at its start, for `WorkFolder.expect`; without OUT's path."""
    read = [*weight_files(recipe.model), *(adapter_files(recipe.adapter) if recipe.adapter else ())]
    return {
        "command": command,
        "recipe": {key: value for key, value in recipe.plain().items() if key != "out"},
        "model": {**identity.source_identity(recipe.model), "files": identity.unchanged(sorted(read))},
        "versions": identity.versions(),
        "threads": torch.get_num_threads(),
    }


def derive_source(recipe: Recipe, work: WorkFolder, progress: Progress) -> Source | None:
    """Write the 16-bit model that the run quantizes to its work folder, if it differs from the recipe's: dequantized, with the
    adapter merged, rotated, in this order. None: the run quantizes the recipe's model.

    Raises:
        UserError: the model can't be rotated, the adapter can't be merged, or the disk is full.
    """
    device = accelerator() or "cpu"

    def derived(name: str, label: str, write: Callable[..., object]) -> Source:
        with phase(label.split()[0]), distributed.shared_errors():
            if distributed.is_main():
                write(work.folder / name, progress=lambda done, total: progress(label, done, total))
        return Source.of(work.folder / name)

    source = None
    if recipe.from_quantized:
        source = derived("dequantized", "dequantizing", functools.partial(write_dequantized, recipe.model))
    if recipe.adapter:
        base = source or Source.of(recipe.model)
        merge = functools.partial(adapter.write_merged, base, recipe.adapter)
        source = derived("merged", "merging the adapter", merge)
    if recipe.rotate:
        base = source or Source.of(recipe.model)
        if problems := rotation_problems(recipe, base):
            raise UserError(problems[0])
        rotations = rotate.Rotations(recipe.rotate, recipe.seed)
        rotating = functools.partial(rotate.write_rotated, base, rotations=rotations, device=device)
        source = derived("rotated", "rotating", rotating)
    return source

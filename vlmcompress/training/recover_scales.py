"""Recover what quantization cost a model: train the scales of its codes, which stay as they are, towards the original.

The teacher is the original in 16 bits, with all visual tokens; the student is the quantized checkpoint, behind the reducer that
it carries, if any. Once the teacher has answered, its model becomes the student: each quantized layer is replaced by its codes
and scales (`coded_linear`), and all else gets the checkpoint's values, so that one model is in memory. What is written is
the checkpoint with other scales (and norms and projector, where these are trained, too) and the same codes. Workers of a team
share out the samples, as in `recover`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress import models
from vlmcompress.export import manifest
from vlmcompress.export.convert import rewrite_tensors
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.export.stored import Stored
from vlmcompress.models import VLM
from vlmcompress.models.data import data_hash
from vlmcompress.models.data.encode import Encoded
from vlmcompress.quantization.inputs import Result
from vlmcompress.quantization.plan.calibration_data import data_source
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.hooks import attach_carried
from vlmcompress.training import teacher_cache
from vlmcompress.training.coded_linear import SCALE, Coded
from vlmcompress.training.recovery_files import model_facts, run_settings
from vlmcompress.training.train_student import Student, TrainingOptions, facts, trained
from vlmcompress.utils import distributed, folders, hub, identity
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, phase, silent, timed_phases
from vlmcompress.utils.tensor_files import DTYPES, read_tensor

FORMAT = "compressed-tensors"


def recover_scales(
    recipe: Recipe,
    training: TrainingOptions,
    teacher: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Result:
    """Train scales of the quantized checkpoint `recipe.model` into `recipe.out`.

    Args:
        recipe: resolved recipe; its model, data and seed are used.
        training: what is trained, `scales` among it, and how.
        teacher: folder of the original in 16 bits.
        resume: go on after an interrupted run with the same settings.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    One of several workers does its share; only the first one's result has a manifest.

    Raises:
        UserError: bad input; nothing was written.
    """
    with timed_phases(), folders.claimed_folder(recipe.model, recipe.output, overwrite=overwrite, mark=MANIFEST):
        return _recovered(recipe, training, teacher, recipe.output, resume, progress)


def _recovered(
    recipe: Recipe, training: TrainingOptions, teacher: Path, out: Path, resume: bool, progress: Progress
) -> Result:
    source = data_source(recipe, teacher, "recover")
    assert source is not None
    with phase("loading"):
        stored = _opened(recipe.model)
        _check_alike(stored, teacher)
        samples = teacher_cache.read(source, recipe, reduced=False)
        settings = _settings(recipe, training, teacher) | {"samples with the hash": data_hash(samples)}
    with distributed.process_group():
        taught = teacher_cache.cache_teacher(
            recipe, teacher, source, samples, settings, resume=resume, progress=progress
        )
        files, data = taught.files, taught.data
        with phase("loading"), distributed.shared_errors():
            vlm = _quantized(taught.vlm, stored, recipe)
            batches = Encoded(data.samples, vlm, max_length=recipe.calibrate.max_length)
        with phase("training"):
            student = Student(vlm, _names(stored), batches, data.held_out, lambda: _reduced(vlm, recipe.model))
            outcome = trained(student, training, recipe.seed, files, progress)
    if not distributed.is_main():
        return Result(out, {})
    changes = _record(stored, facts(training, outcome, data) | {"teacher": hub.facts(teacher), "data": taught.origin})
    written = rewrite_tensors(
        stored,
        out,
        _as_stored(outcome.changed, stored),
        changes,
        extra_files=_beside(recipe.model),
        shard_size=recipe.shard_size,
        progress=lambda done, total: progress("writing", done, total),
    )
    files.remove()
    return Result(out, written)


def _opened(path: Path) -> Stored:
    """The checkpoint whose scales are trained. UserError: it is none of ours, or its numbers are no codes with such scales."""
    with models.quiet():
        stored = Stored.of(path)
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path} has no {MANIFEST}; --train scales takes what `vlmcompress quantize` wrote")
    written = manifest.read(path)
    manifest.verify(path, written)
    if written["recipe"].get("rotate"):
        raise UserError(
            f"{path} was rotated, and its original is no teacher in the same basis; quantize without rotate"
        )
    kinds = {layer.scheme.weights.kind for layer in stored.layers.values()}
    if stored.format != FORMAT or kinds != {"int"}:
        raise UserError(
            f"{path} is of the format {stored.format} with {' and '.join(sorted(kinds))} weights; scales are trained of "
            f"int weights in {FORMAT}"
        )
    return stored


def _check_alike(stored: Stored, teacher: Path) -> None:
    """Refuse a teacher that is not a model of the same shapes, before a weight is read."""
    models.refuse_quantized(teacher, models.read_config(teacher))
    ours, theirs = (model.state_dict(keep_vars=True) for model in (stored.meta_model, models.build_meta_model(teacher)))
    for name in stored.names:
        if name not in theirs or theirs[name].shape != ours[name].shape:
            raise UserError(
                f"--teacher {teacher} is not the original of {stored.path}: '{name}' differs; give the model that was quantized"
            )


def _settings(recipe: Recipe, training: TrainingOptions, teacher: Path) -> dict[str, Any]:
    """All that decides a run besides the samples."""
    particulars = {
        "calibrate.max_length": recipe.calibrate.max_length,
        "a model with the manifest": identity.sha256(recipe.model / MANIFEST),
        "--teacher with the files": model_facts(teacher),
    }
    return run_settings(recipe, training, particulars)


def _quantized(vlm: VLM, stored: Stored, recipe: Recipe) -> VLM:
    """Make of the original's model what a quantized checkpoint is, in place, with that one's processor."""
    model, device = vlm.model, vlm.model.device
    entries = {entry.name: entry for entry in stored.entries}
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for memory, disk in stored.names.items():
            if memory.removesuffix(".weight") not in stored.layers:
                state[memory].copy_(read_tensor(entries[disk]).view_as(state[memory]))
    for name in stored.layers:
        weight, scheme, input_scale = stored[name]
        linear: Any = model.get_submodule(name)
        coded = Coded(weight, linear.bias, linear.weight.dtype, scheme.activations, input_scale)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, coded.to(device))
    processor = models.load_processor(recipe.model, recipe.trust_remote_code)
    return replace(vlm, processor=processor, path=recipe.model)


def _names(stored: Stored) -> dict[str, str]:
    """Parameter of the student (memory name) -> its name on disk."""
    plain = {
        memory: disk for memory, disk in stored.names.items() if memory.removesuffix(".weight") not in stored.layers
    }
    return plain | {f"{name}.{SCALE}": f"{layer.prefix}{SCALE}" for name, layer in stored.layers.items()}


def _as_stored(values: Mapping[str, Tensor], stored: Stored) -> dict[str, Tensor]:
    """Values of parameters by their names on disk, in the types and shapes that they have there."""
    specs, names = {entry.name: entry.spec for entry in stored.entries}, _names(stored)
    tensors = {}
    for name, value in values.items():
        spec = specs[names[name]]
        tensors[names[name]] = value.detach().to("cpu", DTYPES[spec.dtype]).reshape(spec.shape).contiguous()
    return tensors


def _reduced(vlm: VLM, folder: Path) -> contextlib.AbstractContextManager[Any]:
    """The model behind the reducer that a checkpoint carries, if any."""
    return attach_carried(vlm.model, vlm.processor, folder) or contextlib.nullcontext()


def _beside(folder: Path) -> dict[str, Mapping | bytes]:
    """The file of a scorer that a checkpoint carries, as weight files are not copied."""
    carried = reducer_block.read(models.read_config(folder))
    if carried is None or carried.reducer.options.scorer is None:
        return {}
    return {scorer_file.CARRIED: (folder / scorer_file.CARRIED).read_bytes()}


def _record(stored: Stored, recovery: Mapping[str, Any]) -> dict[str, Any]:
    """What is new in the manifest. The errors of layers were those of other scales."""
    changes: dict[str, Any] = {"recovery": recovery}
    if not recovery["changed"]:
        return changes
    warnings = [
        *manifest.read(stored.path)["warnings"],
        "errors of layers are not known, as scales were trained behind them",
    ]
    return changes | {"errors": {}, "warnings": warnings}

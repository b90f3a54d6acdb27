"""Recover accuracy lost to a token reducer: train the model for some steps to answer with the reducer as it did without.

The teacher is the model with all its visual tokens, the student the same model with the reducer (and with smaller images,
where a `resize` comes first). The teacher's next-token distributions at the answers are computed once and stored on disk; then
`train_loop` runs, evaluated on held-out samples. The result is a checkpoint like that of `quantize --scheme none`, with
trained weights. If no measurement beats the original model, the original weights are written. Several workers
(`utils.distributed`) share out the samples, and the first one writes.
"""

from __future__ import annotations

import contextlib

from vlmcompress import models
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.models.data.encode import Encoded
from vlmcompress.quantization.inputs import Result, fit_counter, fit_reducer, fit_resize
from vlmcompress.quantization.plan import make_plan
from vlmcompress.quantization.plan.calibration_data import data_source
from vlmcompress.quantization.run import Recovery, Run, write_checkpoint
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.hooks import attach, resizing
from vlmcompress.training import teacher_cache
from vlmcompress.training.train_student import TrainingOptions, recovery_facts, train_student
from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, phase, silent, timed_phases
from vlmcompress.utils.tensor_files import DTYPES
from vlmcompress.utils.work_folder import WorkFolder, locked_folder

LEARNED_FROM = 128
"""Most samples for fitting a reducer's parameters (such as thresholds)."""


def recover(
    recipe: Recipe,
    training: TrainingOptions,
    *,
    restart: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Result:
    """Train `recipe.model` with `recipe.reduce` into `recipe.out`.

    Args:
        recipe: resolved recipe of scheme `none`; its model, data, seed, reducer and `resize` are used.
        training: what is trained, and how.
        restart: discard the finished work of an interrupted run, which is reused otherwise.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    Each of several workers does its share; only the first worker's result has a manifest.

    Raises:
        UserError: bad input; nothing is written then.
    """
    claim = locked_folder(recipe.model, recipe.output, overwrite=overwrite, mark=MANIFEST, restart=restart)
    with timed_phases(), claim as work:
        return _recovered(recipe, training, work, overwrite, progress)


def _recovered(
    recipe: Recipe, training: TrainingOptions, work: WorkFolder, overwrite: bool, progress: Progress
) -> Result:
    if recipe.reduce is None and recipe.resize is None:
        raise UserError("recover: nothing to recover from; say with --reduce what the model is to run after")
    if models.read_config(recipe.model).get("quantization_config"):
        raise UserError(
            f"{recipe.model} is quantized already; recover the 16-bit original, then quantize what that gives"
        )
    plan = make_plan(recipe)
    merges = recipe.reduce is not None and recipe.reduce.reducer.MERGES
    if merges and "tower" in training.train:
        raise UserError(
            f"--train tower: {recipe.reduce} merges tokens within the tower, where no gradient passes; leave it out"
        )
    source = data_source(recipe, recipe.model, "recover")
    assert source is not None
    with phase("loading"):
        samples = teacher_cache.read_samples(source, recipe, reduced=recipe.reduce is not None)
        particulars = {
            "--reduce": " + ".join(str(part) for part in (recipe.resize, recipe.reduce) if part),
            "a reducer's file with the hash": recipe.reduce.file_hash() if recipe.reduce else "",
        }
        settings = teacher_cache.training_settings("recover", recipe, training, samples, particulars)
    with distributed.process_group():
        work.begin(settings)
        vlm, data, origin = teacher_cache.cache_teacher(recipe, source, samples, work, progress)
        with phase("reducer"), distributed.shared_errors():
            # reducer and resize are fitted to the samples, as in `quantize`
            resize = fit_resize(recipe.resize, vlm, data.samples)
            vlm = resizing.resized(vlm, resize) if resize else vlm
            batches = Encoded(data.samples, vlm, max_length=recipe.calibrate.max_length)
            learns = plan.visual_tokens is not None and plan.visual_tokens.learns
            few = batches[:LEARNED_FROM] if learns else []
            reducer = fit_reducer(recipe.reduce, vlm, few, progress)
            count = fit_counter(plan.visual_tokens, reducer, vlm, few)
            recipe = recipe.model_copy(update={"reduce": reducer, "resize": resize})
        reduced = attach(vlm, recipe.reduce, counter=count) if recipe.reduce else contextlib.nullcontext()
        with phase("training"), reduced:
            names = plan.source.names
            outcome = train_student(vlm, names, batches, data.held_out, training, recipe.seed, work, progress)
    if not distributed.is_main():
        return Result(work.out, {})
    origin |= {"reduce": scorer_file.carried(reducer).plain()} if reducer else {}
    origin |= {"resize": resize.model_dump()} if resize else {}
    types = {name: DTYPES[plan.source.stored[plan.source.names[name]].dtype] for name in outcome.changed}
    run = Run(
        plan=plan,
        recipe=recipe,
        work=work,
        vlm=vlm,
        origin=origin,
        counter=count,
        overwrite=overwrite,
        progress=progress,
    )
    trained_weights = {name: value.to("cpu", types[name]).contiguous() for name, value in outcome.changed.items()}
    written = write_checkpoint(run, Recovery(trained_weights, recovery_facts(training, outcome, data)))
    work.remove()
    return Result(work.out, written)

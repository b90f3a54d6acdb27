"""Quantize a model: plan, read, settle the reducer, solve block by block, write.

Everything that can be refused is refused before a weight is read. Nothing is written to OUT until all of it is known.
Finished blocks are kept beside OUT (`calibration.block_store`), so that `resume=True` goes on where a run was interrupted and
writes the same bytes.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vlmcompress import models
from vlmcompress.calibration import tower_attention
from vlmcompress.calibration.block_store import BlockStore, stored_bytes
from vlmcompress.checkpoint.manifest import MANIFEST
from vlmcompress.common import distributed, folders
from vlmcompress.common.progress import Progress, phase, silent, timed_phases
from vlmcompress.planning import statistics_match
from vlmcompress.planning.calibration_data import check_balance, needing, refuse_without_data
from vlmcompress.planning.plan import Plan, make_plan
from vlmcompress.recipe import Recipe
from vlmcompress.runs import allocate, rotated
from vlmcompress.runs.fit_reducer import counter, settled
from vlmcompress.runs.inputs import Inputs, Result, fingerprint, read_inputs
from vlmcompress.runs.quantize_blocks import compress, solve_blocks
from vlmcompress.runs.write import write_checkpoint


def quantize(recipe: Recipe, *, resume: bool = False, overwrite: bool = False, progress: Progress = silent) -> Result:
    """Quantize `recipe.model` into `recipe.out`.

    Args:
        recipe: resolved recipe.
        resume: go on after an interrupted run with the same recipe, model and data.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    One of several workers (`common.distributed`) does its share; only the first one's result has a manifest.

    Raises:
        UserError: bad input; nothing was written.
    """
    assert recipe.out is not None, "a plan has no output"
    check = functools.partial(folders.check, recipe.model, recipe.out, overwrite=overwrite, mark=MANIFEST)
    with timed_phases(), folders.claimed(recipe.out, check):
        return _quantized(recipe, recipe.out, resume, overwrite, progress)


def _quantized(recipe: Recipe, out: Path, resume: bool, overwrite: bool, progress: Progress) -> Result:
    work = make_plan(recipe)
    refuse_without_data(work)
    folders.check_space(out, space_needed(work, out))
    if work.statistics:
        folders.check_apart(work.statistics.folder, out, "statistics")
        statistics_match.verify(work.statistics, recipe)
    with distributed.process_group():
        if recipe.rotate:
            work = make_plan(recipe, source=rotated.made(recipe, progress))
        if work.budget:
            work = allocate.planned(work, resume=resume, progress=progress)
        inputs = _inputs(work, progress)
        with phase("vision attention"):
            wanted = bool(recipe.vision_attention)
            attention = tower_attention.scales(inputs.vlm, inputs.batches, progress) if wanted else None
        known = work.statistics.reducer if work.statistics else None
        with phase("reducer"):
            reducer = settled(recipe.reduce, inputs.vlm, inputs.batches, progress, known)
            count = counter(work.visual_tokens, reducer, inputs.vlm, inputs.batches)
        learnt = work.recipe.model_copy(update={"reduce": reducer, "resize": inputs.resize})
        if work.prefix != "quantized":  # only the reducer learnt from them
            inputs = replace(inputs, batches=[])
        calibrated = inputs.behind(reducer, progress)
        store = _solved(work, learnt, calibrated, resume, progress)
    if not distributed.is_main():
        return Result(out, {})
    written = write_checkpoint(
        work, learnt, inputs.vlm, store, calibrated.origin, count, attention, overwrite=overwrite, progress=progress
    )
    store.remove()
    allocate.clean(out)
    rotated.clean(out)
    return Result(out, written)


def space_needed(work: Plan, out: Path) -> int:
    """Bytes that a run needs beside those that an earlier one left there: OUT, the finished blocks, and a rotated model."""
    stored = (
        stored_bytes(scheme.weights, work.source.stored[work.source.names[f"{linear}.weight"]].shape)
        for groups in work.blocks
        for group in groups
        if (scheme := work.method.of(group).scheme)
        for linear in group.linears
    )
    copied = work.bytes_before if work.recipe.rotate else 0
    left = sum(folders.bytes_within(folders.beside(out, kind)) for kind in ("resume", "rotated"))
    return work.bytes_after + sum(stored) + copied - left


def _inputs(work: Plan, progress: Progress) -> Inputs:
    """Read the model, with calibration samples if the run or the reducer needs them, and the origin of its statistics."""
    recipe, tokens = work.recipe, work.visual_tokens
    with phase("loading"):
        vlm = models.load(work.source.path, trust_remote_code=recipe.trust_remote_code)
        vlm = replace(vlm, path=recipe.model)  # a rotated one is of this folder, too
    if work.statistics:
        check_balance(recipe, work.statistics.origin["tokens"], work.statistics.folder)
        wanted = recipe.vision_attention or (tokens and tokens.counted)
        resize = work.statistics.resize
        known = recipe.model_copy(update={"resize": resize})
        samples = read_inputs(known, vlm, needing(work), progress).batches if wanted else []
        return Inputs(vlm, samples, work.statistics.origin, resize)
    if not work.reads_data:
        return Inputs(vlm, [], None, recipe.resize)
    inputs = read_inputs(recipe, vlm, needing(work), progress)
    return replace(inputs, origin=inputs.origin and inputs.origin | {"prefix": work.prefix})


def _solved(work: Plan, recipe: Recipe, inputs: Inputs, resume: bool, progress: Progress) -> BlockStore:
    """Quantize the decoder's blocks in `inputs.vlm` and return the store with their results.

    Args:
        recipe: the plan's, with the numbers that were learnt.
    """
    assert recipe.out is not None
    more: dict[str, Any] = {"kv_cache": bool(recipe.kv_cache), "lean": True, "progress": progress}
    with torch.inference_mode(False), torch.no_grad():
        mark = fingerprint(recipe, {"origin": inputs.origin, "bits": work.allocation})
        store = BlockStore(folders.beside(recipe.out, "resume"), mark, resume)
        if distributed.is_main():
            allocate.hand_over(recipe.out, store)
        distributed.barrier()
        if work.statistics:
            offset = inputs.vlm.spec.norm_offset
            solve_blocks(inputs.vlm.model, work.blocks, work.method, store, work.statistics, norm_offset=offset, **more)
        else:
            more |= {
                "all_experts": recipe.calibrate.all_experts,
                "fisher": recipe.calibrate.fisher,
                "seed": recipe.seed,
            }
            compress(inputs.vlm, work.blocks, work.method, inputs.batches, store, **more)
    return store

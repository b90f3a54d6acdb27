"""Quantize a model: plan, read the model and samples, learn the reducer, capture and solve block by block, write.

Everything that can be refused is refused before a weight is read, and OUT is written when all of it is known. Finished blocks
are kept beside OUT (`calibration.block_store`), so that `resume=True` goes on after an interruption and writes the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from vlmcompress.export.manifest import MANIFEST
from vlmcompress.quantization import allocate
from vlmcompress.quantization.blocks import quantize_blocks, solve_blocks
from vlmcompress.quantization.calibration.block_store import BlockStore
from vlmcompress.quantization.inputs import (
    Inputs,
    Result,
    fingerprint,
    learn,
    make_source,
    read_for_plan,
    remove_made,
)
from vlmcompress.quantization.plan import statistics_match
from vlmcompress.quantization.plan.calibration_data import refuse_without_data
from vlmcompress.quantization.plan.plan import Plan, make_plan
from vlmcompress.quantization.write import space_needed, write_checkpoint
from vlmcompress.recipe import Recipe
from vlmcompress.utils import distributed, folders
from vlmcompress.utils.progress import Progress, silent, timed_phases


def quantize(recipe: Recipe, *, resume: bool = False, overwrite: bool = False, progress: Progress = silent) -> Result:
    """Quantize `recipe.model` into `recipe.out`.

    Args:
        recipe: resolved recipe.
        resume: go on after an interrupted run with the same recipe, model and data.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    One of several workers (`utils.distributed`) does its share; only the first one's result has a manifest.

    Raises:
        UserError: bad input; nothing was written.
    """
    out = recipe.output
    with timed_phases(), folders.claimed_folder(recipe.model, out, overwrite=overwrite, mark=MANIFEST):
        plan = _check(make_plan(recipe), out)
        with distributed.process_group():
            if made := make_source(recipe, progress):
                plan = make_plan(recipe, source=made)
            if plan.budget:
                plan = allocate.share_out(plan, resume=resume, progress=progress)
            inputs = read_for_plan(plan, progress)
            with inputs.naming():
                learned = learn(plan, inputs, progress)
                if plan.prefix != "quantized":  # only the reducer learned from the samples
                    inputs = replace(inputs, batches=[])
                decoder_inputs = inputs.behind(learned.recipe.reduce, progress)
                inputs = replace(inputs, batches=[])  # pictures that the decoder behind a reducer does not need
                store = _capture_and_solve(plan, learned.recipe, decoder_inputs, resume, progress)
        if not distributed.is_main():
            return Result(out, {})
        manifest = write_checkpoint(
            plan,
            learned,
            inputs.vlm,
            store,
            decoder_inputs.origin,
            overwrite=overwrite,
            progress=progress,
        )
        store.remove()
        allocate.clean(out)
        remove_made(out)
        return Result(out, manifest)


def _check(plan: Plan, out: Path) -> Plan:
    """The plan, if there are data, room for OUT, and statistics that are of this model. Raises UserError."""
    refuse_without_data(plan)
    folders.check_space(out, space_needed(plan, out))
    if plan.statistics:
        folders.check_apart(plan.statistics.folder, out, "statistics")
        statistics_match.verify(plan.statistics, plan.recipe)
    return plan


def _capture_and_solve(plan: Plan, recipe: Recipe, inputs: Inputs, resume: bool, progress: Progress) -> BlockStore:
    """Quantize the decoder's blocks in `inputs.vlm` and return the store with their results. `recipe`: the learned one."""
    vlm, options = inputs.vlm, {"kv_cache": bool(recipe.kv_cache), "lean": True}
    with torch.inference_mode(False), torch.no_grad():
        mark = fingerprint(recipe, {"origin": inputs.origin, "bits": plan.allocation})
        store = BlockStore(folders.beside(recipe.output, "resume"), mark, resume)
        if distributed.is_main():
            allocate.hand_over(recipe.output, store)
        distributed.barrier()
        if plan.statistics:
            norm_offset, stats = vlm.spec.norm_offset, plan.statistics
            solve_blocks(
                vlm.model, plan.steps, plan.method, store, stats, norm_offset=norm_offset, progress=progress, **options
            )
        else:
            quantize_blocks(
                vlm,
                plan.steps,
                plan.method,
                inputs.batches,
                store,
                all_experts=recipe.calibrate.all_experts,
                release=True,
                progress=progress,
                **options,
            )
    return store

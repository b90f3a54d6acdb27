"""Quantize a model: plan, read the model and samples, learn the reducer, capture and solve block by block, write.

Everything that can be refused is refused before a weight is read, and OUT is written when all of it is known. Finished blocks
are kept next to OUT (`utils.work_folder`), so that the same command goes on after an interruption and writes the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from vlmcompress.export.manifest import MANIFEST
from vlmcompress.quantization import allocate
from vlmcompress.quantization.blocks import quantize_blocks, solve_blocks
from vlmcompress.quantization.inputs import (
    Inputs,
    Result,
    derive_source,
    learn_from_inputs,
    read_for_plan,
    run_settings,
)
from vlmcompress.quantization.plan import statistics_match
from vlmcompress.quantization.plan.calibration_data import refuse_without_data
from vlmcompress.quantization.plan.plan import Plan, make_plan
from vlmcompress.quantization.write import space_needed, write_checkpoint
from vlmcompress.recipe import Recipe
from vlmcompress.utils import distributed, folders
from vlmcompress.utils.progress import Progress, silent, timed_phases
from vlmcompress.utils.work_folder import WorkFolder, locked_folder


def quantize(recipe: Recipe, *, restart: bool = False, overwrite: bool = False, progress: Progress = silent) -> Result:
    """Quantize `recipe.model` into `recipe.out`.

    Args:
        recipe: resolved recipe.
        restart: begin anew where an interrupted run left finished work, which is used otherwise.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    One of several workers (`utils.distributed`) does its share; only the first one's result has a manifest.

    Raises:
        UserError: bad input; nothing was written.
    """
    out = recipe.output
    claim = locked_folder(recipe.model, out, overwrite=overwrite, mark=MANIFEST, restart=restart)
    with timed_phases(), claim as work:
        plan = _check(make_plan(recipe), out)
        with distributed.process_group():
            work.expect(run_settings("quantize", recipe))
            if derived := derive_source(recipe, work, progress):
                plan = make_plan(recipe, source=derived)
            if plan.budget:
                plan = allocate.allocate_bits(plan, work, progress=progress)
            inputs = read_for_plan(plan, progress)
            with inputs.naming():
                learned = learn_from_inputs(plan, inputs, progress)
                if plan.prefix != "quantized":  # only the reducer learned from the samples
                    inputs = replace(inputs, batches=[])
                decoder_inputs = inputs.reduced(learned.recipe.reduce, progress)
                inputs = replace(inputs, batches=[])  # pictures that the decoder after a reducer does not need
                _capture_and_solve(plan, learned.recipe, decoder_inputs, work, progress)
        if not distributed.is_main():
            return Result(out, {})
        manifest = write_checkpoint(
            plan,
            learned,
            inputs.vlm,
            work,
            decoder_inputs.origin,
            overwrite=overwrite,
            progress=progress,
        )
        work.remove()
        return Result(out, manifest)


def _check(plan: Plan, out: Path) -> Plan:
    """The plan, if there are data, room for OUT, and statistics that are of this model. Raises UserError."""
    refuse_without_data(plan)
    folders.check_space(out, space_needed(plan, out))
    if plan.statistics:
        folders.check_apart(plan.statistics.folder, out, "statistics")
        statistics_match.verify_statistics(plan.statistics, plan.recipe)
    return plan


def _capture_and_solve(plan: Plan, recipe: Recipe, inputs: Inputs, work: WorkFolder, progress: Progress) -> None:
    """Quantize the decoder's blocks in `inputs.vlm` and keep their results in `work`. `recipe`: the learned one."""
    vlm, options = inputs.vlm, {"kv_cache": bool(recipe.kv_cache), "lean": True}
    with torch.inference_mode(False), torch.no_grad():
        learned = {"reduce": recipe.reduce and recipe.reduce.plain(), "resize": recipe.resize}
        work.begin({"samples": inputs.origin, "learned": learned, "allocation": plan.allocation})
        if distributed.is_main():
            allocate.take_gradients(work)
        distributed.barrier()
        if plan.statistics:
            norm_offset, stats = vlm.spec.norm_offset, plan.statistics
            solve_blocks(
                vlm.model, plan.steps, plan.method, work, stats, norm_offset=norm_offset, progress=progress, **options
            )
        else:
            quantize_blocks(
                vlm,
                plan.steps,
                plan.method,
                inputs.batches,
                work,
                all_experts=recipe.calibrate.all_experts,
                release=True,
                progress=progress,
                **options,
            )

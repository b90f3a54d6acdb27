"""The manifest of a run: errors, data and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmcompress import models
from vlmcompress.export import adapter, manifest
from vlmcompress.models.data.provenance import no_image_note, skipped_notes
from vlmcompress.numerics.statistics import kv_range
from vlmcompress.quantization.calibration.solve import BlockResult, warnings
from vlmcompress.quantization.plan.plan import Plan
from vlmcompress.quantization.plan.visual_tokens import visual_tokens
from vlmcompress.recipe import Recipe
from vlmcompress.reduction.choice import calibrated
from vlmcompress.utils import model_folder
from vlmcompress.utils.text import size

ENOUGH = 32
"""Calibration samples below which a run warns."""
_TIED = "tie_word_embeddings"


def run_manifest(
    plan: Plan,
    recipe: Recipe,
    results: Sequence[BlockResult],
    origin: Mapping[str, Any] | None,
    recovery: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The manifest of a run without the written size and hashes.

    Args:
        recipe: the plan's recipe with the learned numbers, as written to the checkpoint.
        results: of the decoder's blocks.
        origin: description of the calibration data; None: no calibration.
        recovery: description of the training after quantization or reduction; None: there was none.
    """
    tokens = visual_tokens(recipe, example=True) if recipe.resize else plan.visual_tokens
    unreduced = []
    if recipe.reduce and origin is not None and recovery is None and not calibrated(recipe.reduce):
        unreduced.append(
            f"calibrated on all visual tokens, as {recipe.reduce} drops some only within the language model"
        )
    record = manifest.build(
        recipe.model,
        family=plan.source.spec.family,
        recipe=recipe.plain(),
        calibration=origin,
        errors={name: error for result in results for name, error in result.errors.items()},
        maxima={name: owners for result in results for name, owners in result.maxima.items()},
        kv_cache={name: kv_range.report(r) for result in results for name, r in result.kv_ranges.items()},
        warnings=[*_plan_warnings(plan, origin), *unreduced, *warnings(results)],
        allocation=plan.allocation,
        visual_tokens=tokens.example if tokens else None,
        recovery=recovery,
        devices=plan.device_counts,
    )
    return record | {"size": {"weights_before": models.checkpoint_bytes(recipe.model)}}


def _plan_warnings(plan: Plan, origin: Mapping[str, Any] | None) -> list[str]:
    """Warnings about the plan's model and recipe, a line each. `origin`: description of the calibration data that were read."""
    recipe, source, lines = plan.recipe, plan.source, _untied(plan)
    if origin is not None:
        lines += [*skipped_notes(origin), *no_image_note(origin)]
        if plan.method.needs.statistics and origin["samples"] < ENOUGH:
            fit = (
                "weights fit them better than other inputs" if "gram" in plan.method.needs.statistics else "maxima vary"
            )
            lines.append(f"calibrated on {origin['samples']} samples, and with so few {fit}; give {ENOUGH} or more")
    elif recipe.calibrate.data is not None and not plan.reads_data:
        why = "no layer of the language model is quantized, and nothing is learned from them"
        lines.append(f"the calibration data {Path(recipe.calibrate.data).name} were not read: {why}")
    # faults of the source that the written checkpoint no longer has
    lines += [f"corrected here: of the source, {models.unfound_text(source.unfound)}"] if source.unfound else []
    lines += models.unused_text(source)
    lines += [*models.cast_text(source), *models.mtp_warnings(source.spec, source.config, source.stored)]
    # other files in the folders of model and adapter, and how they were handled
    lines += [*models.asides(recipe.model), *adapter.adapter_notes(recipe)]
    if beyond := models.unembedded(recipe.inputs_folder, models.rows_of(plan.source.meta_model)):
        lines.append(f"{beyond}; a prompt with one of them fails")
    if left := model_folder.unrelated_files(recipe.model):
        rest = f" and {len(left) - 8} more" if len(left) > 8 else ""
        lines.append(f"not copied, as no reader of a checkpoint needs it: {', '.join(left[:8])}{rest}")
    return lines


def _untied(plan: Plan) -> list[str]:
    """A line about an output head that is untied from the embedding, as one of both is rotated or quantized."""
    before = plan.recipe.model if plan.recipe.rotate else plan.source.path
    if models.read_config(before).get(_TIED) is False or plan.source.config.get(_TIED) is not False:
        return []
    extra = sum(spec.nbytes for spec in plan.source.stored.values()) - models.checkpoint_bytes(before)
    what = "the output head shared the embedding's weights and is now a separate matrix"
    why = "rotate" if plan.recipe.rotate else "head"
    return [f"{why}: {what}, {size(extra)} more in 16 bits"] if extra > 0 else []

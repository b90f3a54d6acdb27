"""Write the checkpoint of a run: the decoder's weights from the store, the vision tower, the config, the manifest."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmcompress import models
from vlmcompress.engines.vllm.serve import VISION_SCALES
from vlmcompress.export import adapter, manifest
from vlmcompress.export.write import Checkpoint, write
from vlmcompress.models import VLM, Source
from vlmcompress.models.data.provenance import skipped_notes, unseen
from vlmcompress.numerics import round_to_nearest
from vlmcompress.numerics.statistics import kv_range
from vlmcompress.quantization.allocate import STATISTICS
from vlmcompress.quantization.calibration.block_store import StoredWeights, block_bytes, load_block
from vlmcompress.quantization.calibration.solve import BlockResult, solve_block, warnings
from vlmcompress.quantization.inputs import Learned, reducer_warnings
from vlmcompress.quantization.plan import devices
from vlmcompress.quantization.plan.plan import Plan
from vlmcompress.quantization.plan.visual_tokens import visual_tokens
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.hooks import resizing
from vlmcompress.utils import folders, model_folder
from vlmcompress.utils.progress import Progress
from vlmcompress.utils.text import size
from vlmcompress.utils.work_folder import WorkFolder

_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Recovery:
    """Training of a model: `trained`: parameter (memory name) -> value in the type that the source has; `facts`: the manifest's
    description of the training."""

    trained: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def write_checkpoint(
    plan: Plan,
    learned: Learned,
    vlm: VLM,
    work: WorkFolder,
    origin: dict[str, Any] | None,
    recovery: Recovery | None = None,
    *,
    overwrite: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Write the recipe's `out` and return its manifest.

    Args:
        plan: what was carried out.
        learned: its recipe with all numbers that the reducer and `resize` learned, and what goes with them.
        vlm: the whole model; its norms are divided by their smoothing scales already.
        work: has the results of the decoder's blocks.
        origin: the manifest's description of the calibration data; None for no calibration.
        recovery: the training that the checkpoint comes from; None: there was none.
    """
    recipe, attention = learned.recipe, learned.attention
    setting, extra_files = _setting(recipe, plan.source), _extra_files(recipe, attention)
    if recipe.reduce:  # as the checkpoint has it
        recipe = recipe.model_copy(update={"reduce": scorer_file.carried(recipe.reduce)})
    results = [load_block(work, layer, weights=False) for layer, groups in enumerate(plan.steps) if groups]
    language = StoredWeights(work, plan.steps, plan.method)
    others = _quantize_vision(vlm.model, plan, progress) | _quantize_embedding(vlm.model, plan)
    quantized = ChainMap(others, language)  # type: ignore[arg-type]  # neither is written to
    kv_ranges = {name: ranges for result in results for name, ranges in result.kv_ranges.items()}
    smoothed = {op for result in results for op in (*result.smoothing, *result.multiplied)}
    checkpoint = Checkpoint(
        source=plan.source,
        original=recipe.model,
        files=recipe.inputs_folder,
        quantized=quantized,
        exporter=recipe.exporter,
        layers=plan.layers,
        manifest=_manifest(plan, recipe, vlm, results, origin, recovery.facts if recovery else None),
        changed={**_changed_parameters(vlm.model, smoothed, quantized), **(recovery.trained if recovery else {})},
        kv_scales={name: kv_range.kv_scales(ranges) for name, ranges in kv_ranges.items()},
        reducer=recipe.reduce,
        counter=learned.counter,
        extra_files=extra_files | (resizing.setting_files(recipe.inputs_folder, setting) if setting else {}),
        settings=setting.config if setting else {},
    )
    return write(
        checkpoint,
        recipe.output,
        shard_size=recipe.shard_size,
        overwrite=overwrite,
        progress=lambda done, total: progress("writing", done, total),
    )


def space_needed(plan: Plan, out: Path) -> int:
    """Bytes that a run needs next to those that an earlier one left: OUT, the finished blocks, a rotated or 16-bit model."""
    stored = (
        block_bytes(scheme.weights, plan.source.stored[plan.source.names[f"{linear}.weight"]].shape)
        for groups in plan.steps
        for group in groups
        if (scheme := plan.method.of(group).scheme)
        for linear in group.linears
    )
    recipe = plan.recipe
    copied = plan.bytes_before * sum(map(bool, (recipe.rotate, recipe.from_quantized, recipe.adapter)))
    kept = WorkFolder(out).folder
    left = folders.bytes_within(kept) - folders.bytes_within(kept / STATISTICS)
    return plan.bytes_after + sum(stored) + copied - left


def _setting(recipe: Recipe, source: Source) -> models.ImageSetting | None:
    """The setting by which the processor is to make images smaller; None where they stay as they are."""
    if recipe.resize is None:
        return None
    processor = models.load_processor(recipe.inputs_folder, recipe.trust_remote_code)
    return resizing.choose_setting(source.spec, processor, recipe.resize)


def _extra_files(recipe: Recipe, attention: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any] | bytes]:
    """Further files: scales of the tower's attention, and the scorer of a reducer that goes by one."""
    files: dict[str, Mapping[str, Any] | bytes] = {VISION_SCALES: attention} if attention else {}
    reduce = recipe.reduce
    return files | ({scorer_file.CARRIED: scorer_file.content(reduce)} if reduce and reduce.options.scorer else {})


def _manifest(
    plan: Plan,
    recipe: Recipe,
    vlm: VLM,
    results: Sequence[BlockResult],
    origin: Mapping[str, Any] | None,
    recovery: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The manifest without sizes and hashes. `results`: of the decoder's blocks; others as in `write_checkpoint`."""
    tokens = visual_tokens(recipe, example=True) if recipe.resize else plan.visual_tokens
    kv_ranges = {name: ranges for result in results for name, ranges in result.kv_ranges.items()}
    unreduced = [] if recovery else reducer_warnings(recipe.reduce, origin)
    return manifest.build(
        vlm.path,
        family=vlm.spec.family,
        recipe=recipe.plain(),
        calibration=origin,
        errors={name: error for result in results for name, error in result.errors.items()},
        maxima={name: owners for result in results for name, owners in result.maxima.items()},
        kv_cache={name: kv_range.report(ranges) for name, ranges in kv_ranges.items()},
        warnings=[*_of_plan(plan, origin), *unreduced, *warnings(results)],
        allocation=plan.allocation,
        visual_tokens=tokens.example if tokens else None,
        recovery=recovery,
        devices=devices.launch_device_counts(plan),
    )


def _of_plan(plan: Plan, origin: Mapping[str, Any] | None) -> list[str]:
    """Warnings about the plan's model and recipe, a line each. `origin`: of the data that were read, if any."""
    data = _unread(plan) if origin is None else [*skipped_notes(origin), *unseen(origin)]
    return [*_untied(plan), *data, *_changed(plan.source), *_of_folders(plan)]


def _of_folders(plan: Plan) -> list[str]:
    """Lines about what lies in the folders of model and adapter, and what became of it."""
    recipe, lines = plan.recipe, [*models.asides(plan.recipe.model), *adapter.adapter_notes(plan.recipe)]
    if beyond := models.unembedded(recipe.inputs_folder, models.rows_of(plan.source.meta_model)):
        lines.append(f"{beyond}; a prompt with one of them fails")
    if left := model_folder.unrelated_files(recipe.model):
        rest = f" and {len(left) - 8} more" if len(left) > 8 else ""
        lines.append(f"not copied, as no reader of a checkpoint asks for it: {', '.join(left[:8])}{rest}")
    return lines


def _changed(source: Source) -> list[str]:
    """Lines about faults of the source that the written checkpoint no longer has."""
    lines = [f"corrected here: of the source, {models.unfound_text(source.unfound)}"] if source.unfound else []
    lines += models.cast_text(source)
    return [*lines, *models.draft_dropped(source.spec, source.config, source.stored)]


def _untied(plan: Plan) -> list[str]:
    """A line about an output head that is untied from the embedding, as one of both is rotated or quantized."""
    before = plan.recipe.model if plan.recipe.rotate else plan.source.path
    if models.read_config(before).get(_TIED) is False or plan.source.config.get(_TIED) is not False:
        return []
    extra = sum(spec.nbytes for spec in plan.source.stored.values()) - models.checkpoint_bytes(before)
    what = "the output head shared the embedding's weights and is a matrix of its own now"
    why = "rotate" if plan.recipe.rotate else "head"
    return [f"{why}: {what}, {size(extra)} more in 16 bits"] if extra > 0 else []


def _unread(plan: Plan) -> list[str]:
    """A line about calibration data that were named but not read."""
    data = plan.recipe.calibrate.data
    if data is None or plan.reads_data or plan.statistics:
        return []
    why = "no layer of the language model is quantized, and nothing is learned from them"
    return [f"the calibration data {Path(data).name} were not read: {why}"]


def _changed_parameters(model: nn.Module, ops: set[str], quantized: Collection[str]) -> dict[str, Tensor]:
    """Parameters that smoothing changed and that are stored in 16 bits: weights of norms and of layers that stay as they
    are, biases of quantized ones."""
    return {
        name: parameter.detach().contiguous()
        for op in sorted(ops)
        for name, parameter in model.get_submodule(op).named_parameters(prefix=op, recurse=False)
        if name.removesuffix(".weight") not in quantized
    }


def _quantize_embedding(model: PreTrainedModel, plan: Plan) -> dict[str, tuple]:
    """Round the token embedding to nearest: each row is looked up by itself, so that nothing can make up for its errors."""
    name = models.embedding_name(model)
    scheme = plan.schemes.get(name)
    weight = model.get_parameter(f"{name}.weight")
    return {name: (round_to_nearest(weight, scheme.weights, scale_dtype=weight.dtype), scheme, None)} if scheme else {}


def _quantize_vision(model: nn.Module, plan: Plan, progress: Progress) -> dict[str, tuple]:
    """Round the vision tower's linear layers to nearest; the engine scales their inputs token by token."""
    if plan.vision_method is None:
        return {}
    quantized: dict[str, tuple] = {}
    for done, group in enumerate(plan.vision_groups, start=1):
        weights = {name: model.get_parameter(f"{name}.weight") for name in group.linears}
        result = solve_block([group], weights, {}, plan.vision_method, next(iter(weights.values())).dtype)
        quantized |= {name: (weight, plan.vision_method.scheme, None) for name, weight in result.weights.items()}
        progress("quantizing the vision tower", done, len(plan.vision_groups))
    return quantized

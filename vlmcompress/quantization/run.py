"""Quantize a model: check, derive, allocate bits, read, learn, capture and solve, write. `quantize` calls these in turn.

Everything that can be refused is refused before a weight is read. Finished blocks and weight files are kept next to OUT
(`utils.work_folder`), so that the same command goes on after an interruption and writes the same bytes.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.export.manifest import MANIFEST, build
from vlmcompress.export.write import Checkpoint, Quantized, plan_tensors, write, written_config
from vlmcompress.models import VLM, Group
from vlmcompress.models.data.provenance import no_image_note, skipped_notes, token_counts
from vlmcompress.models.devices import accelerator, full_float32, trim
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.numerics.statistics import kv_range
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.numerics.statistics.inputs import STATISTICS, GroupStats
from vlmcompress.quantization import allocate
from vlmcompress.quantization.calibration.block_store import (
    StoredWeights,
    block_bytes,
    block_name,
    load_block,
    save_block,
)
from vlmcompress.quantization.calibration.solve import BlockResult, QuantMethod, apply, solve_block, warnings
from vlmcompress.quantization.inputs import (
    Inputs,
    Result,
    derive_source,
    fit_counter,
    fit_reducer,
    naming,
    read_for_plan,
    run_settings,
)
from vlmcompress.quantization.plan import make_plan, with_problems
from vlmcompress.quantization.plan.calibration_data import require_calibration_data
from vlmcompress.quantization.plan.plan import Plan
from vlmcompress.quantization.plan.visual_tokens import visual_tokens
from vlmcompress.recipe import Recipe, adapter
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.choice import calibrated
from vlmcompress.reduction.hooks import resizing
from vlmcompress.reduction.methods import TokenCounter
from vlmcompress.utils import distributed, folders, model_folder
from vlmcompress.utils.progress import Progress, phase, silent, timed_phases
from vlmcompress.utils.text import size
from vlmcompress.utils.work_folder import WorkFolder, locked_folder

ENOUGH = 32
"""Calibration samples below which a run warns."""
_TIED = "tie_word_embeddings"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has read its model and learned from its samples.

    Attributes:
        plan: what is done.
        recipe: the plan's, with the numbers that the reducer and `resize` learned.
        work: the folder of the run's finished blocks; `work.out` is the folder that is written.
        vlm: the whole model.
        origin: the manifest's description of the calibration data; None: no calibration.
        counter: computes how many tokens an image keeps; None: nothing needs it.
        overwrite: replace an existing OUT that vlmcompress wrote.
        progress: called with (label, done, total).
    """

    plan: Plan
    recipe: Recipe
    work: WorkFolder
    vlm: VLM
    origin: dict[str, Any] | None = None
    counter: TokenCounter | None = None
    overwrite: bool = False
    progress: Progress = silent


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
    claim = locked_folder(recipe.model, recipe.output, overwrite=overwrite, mark=MANIFEST, restart=restart)
    with timed_phases(), claim as work:
        # Check, from headers and names of files; nothing is written yet.
        plan = make_plan(recipe)
        require_calibration_data(plan)
        accelerator()  # which raises where there is a GPU that can't be used
        folders.require_space(work.out, space_needed(plan, work.out))
        with distributed.process_group():
            # What the run depends on and is known now; `WorkFolder.begin` adds what was learned, before the first block.
            work.expect(run_settings("quantize", recipe))
            # Derive the model to quantize: dequantized to 16 bits, with the adapter merged, rotated.
            if derived := derive_source(recipe, work, progress):
                plan = with_problems(plan.with_source(derived))
            # Read the model, and the calibration samples if anything needs them.
            recipe, inputs = plan.recipe, read_for_plan(plan, progress)
            vlm = inputs.vlm
            with naming(inputs.names):
                # Learn the reducer's thresholds and token counts.
                with phase("reducer"):
                    reducer = fit_reducer(recipe.reduce, vlm, inputs.samples, progress)
                    counter = fit_counter(plan.visual_tokens, reducer, vlm, inputs.samples)
                # Keep the samples only if blocks are run on them (the reducer alone may have needed them), and replace them by
                # the shorter inputs that the reducer leaves the decoder. Images are freed.
                inputs = replace(inputs, samples=inputs.samples if plan.observes else [])
                inputs = inputs.reduced(reducer, progress).counted(plan.calibration_tokens, recipe.seed)
                learned = {"reduce": reducer and reducer.plain(), "resize": inputs.resize}
                work.begin({"samples": inputs.origin, "learned": learned})
                # Allocate bits: each group of layers gets a width.
                if plan.budget:
                    plan = allocate.allocate_bits(plan, inputs, work, progress)
                run = Run(
                    plan=plan,
                    recipe=recipe.model_copy(update={"reduce": reducer, "resize": inputs.resize}),
                    work=work,
                    vlm=vlm,
                    origin=inputs.origin,
                    counter=counter,
                    overwrite=overwrite,
                    progress=progress,
                )
                # Capture and solve the decoder's blocks one by one.
                # Without samples, layers are rounded when they are written.
                if inputs.samples:
                    with torch.inference_mode(False), torch.no_grad(), full_float32():
                        quantize_blocks(run, inputs)
        if not distributed.is_main():
            return Result(work.out, {})
        # Write the checkpoint from the finished blocks.
        manifest = write_checkpoint(run)
        work.remove()
        return Result(work.out, manifest)


def space_needed(plan: Plan, out: Path) -> int:
    """Bytes that a run needs next to those that an earlier one left: OUT, calibrated blocks, a rotated or 16-bit model."""
    stored = (
        block_bytes(scheme.weights, plan.source.stored[plan.source.names[f"{linear}.weight"]].shape)
        for groups in (plan.steps if plan.observes else ())
        for group in groups
        if (scheme := plan.method.of(group).scheme)
        for linear in group.linears
    )
    recipe = plan.recipe
    copied = plan.bytes_before * sum(map(bool, (recipe.rotate, recipe.from_quantized, recipe.adapter)))
    kept = WorkFolder(out).folder
    return plan.bytes_after + sum(stored) + copied - folders.bytes_within(kept)


def quantize_blocks(run: Run, inputs: Inputs) -> None:
    """Quantize the decoder's blocks in the model, in a pass over the samples of `inputs`, and store them in the work folder:
    each block is captured after those that are quantized already, solved, and its result put into the model.

    Weights are mapped from their files until they are changed, and a block's are freed when its output has been passed on, so
    memory holds those of one block, however large the model.
    """
    from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
    from vlmcompress.quantization.calibration.gradient_pass import kept_sensitivities

    vlm, samples, work, progress = inputs.vlm, inputs.samples, run.work, run.progress
    # `steps` are the decoder's blocks and, if it is quantized, the output head as a last block of one group.
    method, blocks, norm_offset = run.plan.method, run.plan.steps, vlm.spec.norm_offset
    sensitivities: Mapping[tuple[int, str], Sensitivity] = {}
    with phase("gradients"):
        if "gradient" in method.needs.statistics:
            sensitivities = kept_sensitivities(work, vlm, blocks, samples, progress)
    # Smoothing scales by (block, group), from a search that runs blocks of the unquantized model.
    scales: Mapping[tuple[int, str], Tensor] = {}
    with phase("searching"):
        if method.needs.block_scales:
            from vlmcompress.quantization.calibration.block_search import search_blocks

            experts = run.recipe.calibrate.all_experts
            searched = search_blocks(
                vlm, blocks, samples, method, sensitivities, all_experts=experts, progress=progress
            )
            scales = {key: candidates.best for key, candidates in searched.items()}
    # "gradient" is not a statistic of inputs and was read above. Added are, if inputs are rounded, "absmax", with which the
    # rows are kept that this rounding's error is measured on; and the Gram matrix for errors that the held-out samples do not
    # show: of a modality that they lack, or of an expert, as none of them may be routed to it.
    statistics = method.needs.statistics & STATISTICS | ({"absmax"} if method.rounds_inputs else set())
    measured, occurring = (
        {name for name, count in token_counts(part)["tokens"].items() if count} for part in (inputs.held_out, samples)
    )
    if occurring - measured or any(group.expert is not None for groups in blocks for group in groups):
        statistics |= {"gram"}
    spec = CaptureSpec(
        statistics,
        "quantized",
        bool(run.recipe.kv_cache),
        tokens=run.plan.calibration_tokens,
        seed=run.recipe.seed,
        all_experts=run.recipe.calibrate.all_experts,
        held_out=len(inputs.held_out),
    )

    def free(layer: int) -> None:
        """Free the weights of a block whose output has been passed on."""
        for name in (name for group in blocks[layer] for name in group.linears):
            weight = torch.empty_like(vlm.model.get_parameter(f"{name}.weight"), device="meta")
            vlm.model.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
        trim()

    captures = capture_blocks(
        vlm,
        blocks,
        [*samples, *inputs.held_out],
        spec,
        finished=lambda layer: work.has(block_name(layer)),
        passed=free,
        release=True,
        progress=progress,
    )
    for layer, captured in captures:
        if captured is None:
            apply(load_block(work, layer), _modules(vlm.model, blocks[layer]), norm_offset)
            continue
        groups = [group for group in blocks[layer] if group.name in captured.stats]
        for name in captured.stats:  # a variable for the statistics would keep a Gram matrix in memory
            captured.stats[name].sensitivity = sensitivities.get((layer, name))
        smoothing = {name: scale for (block, name), scale in scales.items() if block == layer}
        # The block is on the accelerator, the rest of the model need not be.
        device = vlm.model.get_parameter(f"{groups[0].linears[0]}.weight").device
        result = _solve(vlm, groups, captured.stats, method, smoothing, device)
        result.kv_ranges |= captured.kv_ranges
        apply(result, _modules(vlm.model, groups), norm_offset)
        with phase("storing"):
            if distributed.is_main():
                save_block(work, layer, result)


def _modules(model: nn.Module, groups: Sequence[Group]) -> dict[str, Any]:
    """Memory name -> module: the groups' linear layers, the ops that feed them, and the 16-bit layers that these also feed."""
    names = {name for group in groups for name in (*group.linears, *group.kept, group.smooth) if name}
    return {name: model.get_submodule(name) for name in names}


def _solve(
    vlm: VLM,
    groups: Sequence[Group],
    stats: dict[str, GroupStats],
    method: QuantMethod,
    scales: Mapping[str, Tensor],
    device: torch.device,
) -> BlockResult:
    """Solve groups of a block on `device`. `scales`: group name -> smoothing scale that was searched before."""
    modules = _modules(vlm.model, groups)
    weights = {name: modules[name].weight.detach().to(device) for group in groups for name in group.linears}
    norms = {
        g.smooth: modules[g.smooth].weight.detach().to(device) for g in groups if g.smooth and g.smooth_kind == "norm"
    }
    smoothing = {name: scale.to(device) for name, scale in scales.items()}
    with phase("solving"):
        dtype = method.scale_dtype or next(iter(weights.values())).dtype
        return solve_block(groups, weights, stats, method, dtype, smoothing, norms, vlm.spec.norm_offset)


class RoundedLayers(Mapping):
    """A lazy mapping of linear layer to (weight, scheme, input scale). A group is rounded when its first layer is read, on the
    accelerator if there is one; results are kept until they are read.

    Args:
        errors: takes the errors of layers (as in `BlockResult`) once they are rounded; its order is that of the groups.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        method: QuantMethod,
        errors: dict[str, dict[str, float]] | None = None,
    ):
        self._model, self._method = model, method
        self._group = {name: group for group in groups for name in group.linears}
        self._errors = {} if errors is None else errors
        self._errors |= {name: {} for name in self._group}
        self._results: dict[str, tuple[QTensor, Scheme, Tensor | None]] = {}

    def __getitem__(self, name: str) -> tuple[QTensor, Scheme, Tensor | None]:
        group, device = self._group[name], accelerator() or torch.device("cpu")
        if name not in self._results:
            weights = {each: self._model.get_parameter(f"{each}.weight").detach().to(device) for each in group.linears}
            dtype, scheme = self._method.scale_dtype or weights[name].dtype, self._method.of(group).scheme
            assert scheme is not None  # a plan has no other groups
            with phase("solving"):
                result = solve_block([group], weights, {}, self._method, dtype)
            for each, weight in result.weights.items():
                self._results[each] = weight, scheme, result.input_scales.get(each)
            self._errors |= result.errors
        return self._results.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._group

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


def write_checkpoint(run: Run) -> dict[str, Any]:
    """Write OUT from the finished blocks of a run, and layers that are rounded now, and return its manifest."""
    plan, recipe = run.plan, run.recipe
    extra_files: dict[str, Mapping[str, Any] | bytes] = {}
    setting = None
    if recipe.resize:
        processor = models.load_processor(recipe.inputs_folder, recipe.trust_remote_code)
        setting = resizing.choose_setting(plan.source.spec, processor, recipe.resize)
        extra_files |= resizing.setting_files(recipe.inputs_folder, setting)
    if recipe.reduce:
        if recipe.reduce.reducer.scorer:
            extra_files[scorer_file.CARRIED] = scorer_file.content(recipe.reduce)
        recipe = recipe.model_copy(update={"reduce": scorer_file.carried(recipe.reduce)})  # as the checkpoint has it

    results = []
    if plan.observes:
        results = [load_block(run.work, layer, weights=False) for layer, groups in enumerate(plan.steps) if groups]
    manifest = run_manifest(plan, recipe, results, run.origin)
    quantized = _quantized_layers(run, manifest["errors"])
    schemes = {name: plan.schemes[name] for name in quantized}

    # Smoothing changed what is stored in 16 bits, too: norms, layers that stay as they are, biases of quantized ones.
    smoothed = {op for result in results for op in (*result.smoothing, *result.multiplied)}
    changed = {
        name: parameter.detach().contiguous()
        for op in sorted(smoothed)
        for name, parameter in run.vlm.model.get_submodule(op).named_parameters(prefix=op, recurse=False)
        if name.removesuffix(".weight") not in schemes
    }
    kv_scales = {n: kv_range.kv_scales(ranges) for result in results for n, ranges in result.kv_ranges.items()}
    checkpoint = Checkpoint(
        original=recipe.model,
        files=recipe.inputs_folder,
        tensors=plan_tensors(plan.source, recipe.exporter, schemes, changed, kv_scales),
        quantized=quantized,
        shapes={layer: plan.source.specs[plan.source.names[f"{layer}.weight"]].shape for layer in schemes},
        exporter=recipe.exporter,
        layers=plan.layers,
        config=written_config(plan.source, schemes, recipe.reduce, run.counter, setting),
        manifest=manifest,
        extra_files=extra_files,
        shard_size=recipe.shard_size,
        mmproj=recipe.mmproj,
        work=run.work,
    )
    return write(
        checkpoint,
        run.work.out,
        overwrite=run.overwrite,
        progress=lambda done, total: run.progress("writing", done, total),
    )


def _quantized_layers(run: Run, errors: dict[str, dict[str, float]]) -> Mapping[str, Quantized]:
    """All quantized layers of a run: those of finished blocks, and those that are rounded when they are read. `errors`: the
    manifest's, which takes those of the decoder's layers that are rounded.

    Layers are rounded when they are read if they depend on nothing but their weight: without calibration those of the decoder;
    those of the vision tower, whose inputs the engine scales token by token; the token embedding, whose rows are looked up one
    at a time, so that no other row can compensate for a row's error.
    """
    plan, model = run.plan, run.vlm.model
    parts: list[RoundedLayers | StoredWeights] = []
    if plan.observes:
        parts.append(StoredWeights(run.work, plan.steps, plan.method))
    else:
        parts.append(RoundedLayers(model, [*itertools.chain(*plan.steps)], plan.method, errors))
    if plan.vision_method:
        parts.append(RoundedLayers(model, plan.vision_groups, plan.vision_method))
    embedding = models.embedding_name(model)
    if scheme := plan.schemes.get(embedding):
        bits, group, symmetric = scheme.weights.bits, scheme.weights.group, scheme.weights.symmetric
        method = QuantMethod.named("rtn", bits=bits, group_size=group, symmetric=symmetric)
        parts.append(RoundedLayers(model, [Group(0, "embedding", (embedding,))], method))
    return ChainMap(*parts)  # type: ignore[arg-type]  # it is not written to


def run_manifest(
    plan: Plan,
    recipe: Recipe,
    results: Sequence[BlockResult],
    origin: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The manifest of a run without the written size and hashes.

    Args:
        recipe: the plan's recipe with the learned numbers, as written to the checkpoint.
        results: of the decoder's blocks.
        origin: description of the calibration data; None: no calibration.
    """
    tokens = visual_tokens(recipe, example=True) if recipe.resize else plan.visual_tokens
    unreduced = []
    if recipe.reduce and origin is not None and not calibrated(recipe.reduce):
        unreduced.append(
            f"calibrated on all visual tokens, as {recipe.reduce} drops some only within the language model"
        )
    record = build(
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
    lines += [*models.asides(recipe.model), *adapter.notes(recipe.model, recipe.adapter)]
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

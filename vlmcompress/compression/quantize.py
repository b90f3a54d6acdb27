"""The story of one run: check, load, calibrate block by block, write.

Everything that can be refused is refused before a weight is read. Nothing is written to OUT until all of it is known;
what a run has finished is kept beside OUT (`resume.LayerStore`), so that `resume=True` goes on where it was
interrupted, to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.blocks.solve import solve_layer, warnings
from vlmcompress.blocks.store import LayerStore, StoredWeights
from vlmcompress.checkpoint import manifest
from vlmcompress.checkpoint import write as checkpoint
from vlmcompress.common import folders as atomic
from vlmcompress.common.progress import Progress, silent
from vlmcompress.compression import allocate
from vlmcompress.compression.blocks import compress, solve_blocks
from vlmcompress.data import bundled, encode, load_mixed, provenance
from vlmcompress.errors import UserError
from vlmcompress.exporters import compressed_tensors
from vlmcompress.models import VLM
from vlmcompress.planning import plan
from vlmcompress.planning import reducer as reducing
from vlmcompress.recipe import Recipe
from vlmcompress.reducers._counter import Counter
from vlmcompress.statistics import kv_range
from vlmcompress.statistics.balance import weighed


@dataclass(frozen=True)
class Result:
    """A finished run: the folder and what its manifest says."""

    out: Path
    manifest: dict


def quantize(recipe: Recipe, *, resume: bool = False, overwrite: bool = False, progress: Progress = silent) -> Result:
    """Quantize `recipe.model` into `recipe.out`.

    Args:
        recipe: resolved recipe.
        resume: go on after an interrupted run with the same recipe, model and data.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    Raises:
        UserError: bad input; nothing was written.
    """
    assert recipe.out is not None, "a plan has no output"
    source, out = recipe.model, recipe.out
    atomic.check(source, out, overwrite=overwrite)
    work = plan.build(recipe)
    if work.statistics:
        atomic.check_apart(work.statistics.folder, out, "statistics")
        work.statistics.verify(recipe)
    if work.room:
        work = allocate.planned(work, resume=resume, progress=progress)
    vlm = models.load(source, trust_remote_code=recipe.trust_remote_code)
    batches, origin = _input(recipe, vlm, work)
    known = work.statistics.reducer if work.statistics else None
    recipe = reducing.settled(recipe, vlm, batches, known, progress)
    counter = reducing.counter(recipe, vlm, batches)
    if work.statistics or not (work.needs_data or recipe.calibrate.data):  # only the reducer learnt from them
        batches = []
    whole, (vlm, batches, origin) = vlm, behind_reducer(recipe, vlm, batches, origin, progress)
    folder = out.with_name(f".{out.name}.resume")
    more: dict[str, Any] = {"kv_cache": bool(recipe.kv_cache), "progress": progress}
    with torch.inference_mode(False), torch.no_grad():
        store = LayerStore(folder, fingerprint(recipe, source, {"origin": origin, "bits": work.allocation}), resume)
        allocate.hand_over(out, store)
        if work.statistics:
            solve_blocks(vlm.model, work.blocks, work.method, store, work.statistics, **more)
        else:
            compress(vlm, work.blocks, work.method, batches, store, **more)
    written = _write(recipe, whole, work, store, origin, counter, out, overwrite, progress)
    store.remove()
    allocate.clean(out)
    return Result(out, written)


def _input(recipe: Recipe, vlm: VLM, work: plan.Plan) -> tuple[list[dict[str, Tensor]], dict | None]:
    """Calibration samples, where they are to be run, and what the manifest says about where statistics come from."""
    learns = f"reducer '{recipe.reduce.method}'" if recipe.reduce and reducing.learns(recipe) else None
    if work.statistics:
        _check_balance(recipe, work.statistics.origin["tokens"], work.statistics.folder)
        samples = calibration_batches(recipe, vlm, learns)[0] if reducing.counted(recipe) else []
        return samples, work.statistics.origin
    batches, origin = calibration_batches(recipe, vlm, f"scheme '{recipe.scheme}'" if work.needs_data else learns)
    return batches, origin and origin | {"prefix": work.prefix}


def calibration_batches(recipe: Recipe, vlm: VLM, needed: str | None) -> tuple[list[dict[str, Tensor]], dict | None]:
    """Encoded calibration samples and where they came from; none unless something needs them or they are named.

    Args:
        needed: what needs them.
    """
    settings = recipe.calibrate
    source = settings.data or (bundled(vlm.path, "calibration") if needed else None)
    if source is None:
        if needed:
            raise UserError(f"{needed} needs calibration images; name some with --calib FOLDER or FILE")
        return [], None
    samples, texts = load_mixed(source, settings.text, samples=settings.samples, seed=recipe.seed)
    batches = encode([*samples, *texts], vlm, max_length=settings.max_length)
    text = (texts, settings.text) if settings.text else None
    origin = provenance(samples, batches, source, seed=recipe.seed, processor=vlm.processor, text=text)
    _check_balance(recipe, origin["tokens"], source)
    return batches, origin


def behind_reducer(
    recipe: Recipe, vlm: VLM, batches: list[dict[str, Tensor]], origin: dict | None, progress: Progress = silent
) -> tuple[VLM, list[dict[str, Tensor]], dict | None]:
    """What to calibrate, on what, and where that came from, when the recipe's reducer shortens what the decoder gets.

    Without one, or without samples, the arguments. With one, the decoder alone (the same modules) and its inputs.
    """
    chosen = reducing.calibrated(recipe)
    if chosen is None or not batches or origin is None:
        return vlm, batches, origin
    from vlmcompress.calibration.behind_reducer import decoder, reduced
    from vlmcompress.data.provenance import token_counts

    shorter = reduced(vlm, batches, chosen, progress)
    return decoder(vlm), shorter, origin | token_counts(shorter) | {"reduce": chosen.plain()}


def _check_balance(recipe: Recipe, tokens: Mapping[str, int], source: str | Path) -> None:
    """Refuse a balance that weighs a modality of which the calibration data have no token."""
    if missing := [name for name in weighed(getattr(recipe.options, "balance", "off")) if not tokens[name]]:
        remedy = {"vision": "images", "answer": "an `answer` to each sample", "text": "questions"}
        add = " and ".join(remedy[name] for name in missing)
        what = f"the calibration data {Path(source).name} have no {' and no '.join(missing)} tokens"
        raise UserError(f"{what}, which options.balance weighs; add {add}, or set options.balance=off")


def fingerprint(recipe: Recipe, source: Path, origin: dict | None) -> str:
    """What the results of the blocks depend on, as a hash."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(source.glob("*.safetensors"))]
    parts: list[Any] = [manifest.source_identity(source), files, recipe.plain(), origin, manifest.versions()]
    parts.append(torch.get_num_threads())
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _write(
    recipe: Recipe,
    vlm: VLM,
    work: plan.Plan,
    store: LayerStore,
    origin: dict | None,
    counter: Counter | None,
    out: Path,
    overwrite: bool,
    progress: Progress,
) -> dict:
    """Put the stored results together into OUT; returns the manifest."""
    results = [store.load(layer, weights=False) for layer, groups in enumerate(work.blocks) if groups]
    language = StoredWeights(store, work.blocks, work.method)
    tower = _quantize_vision(vlm.model, work, progress)
    quantized = ChainMap(tower, language)  # type: ignore[arg-type]  # neither is written to
    kv_ranges = {name: ranges for result in results for name, ranges in result.kv_ranges.items()}
    smoothed = {op for result in results for op in result.smoothing}
    names = models.disk_names(vlm.model, models.tensor_headers(vlm.path))
    ignore = models.ignore_patterns(vlm.model, vlm.spec, set(quantized), names)
    config = compressed_tensors.quantization_config(work.targets, ignore, kv_cache=bool(recipe.kv_cache))
    return checkpoint.write(
        vlm.path,
        out,
        quantized=quantized,
        names=names,
        quantization_config=config,
        manifest=manifest.build(
            vlm.path,
            family=vlm.spec.family,
            recipe=recipe.plain(),
            calibration=origin,
            errors={name: error for result in results for name, error in result.errors.items()},
            maxima={name: owners for result in results for name, owners in result.maxima.items()},
            kv_cache={name: kv_range.report(ranges) for name, ranges in kv_ranges.items()},
            warnings=reducing.warnings(recipe, origin) + warnings(results),
            allocation=work.allocation,
            visual_tokens=work.tokens,
        ),
        changed=_changed_parameters(vlm.model, smoothed, quantized),
        kv_scales={name: kv_range.scales(ranges) for name, ranges in kv_ranges.items()},
        reducer=recipe.reduce,
        counter=counter,
        shard_size=recipe.shard_size,
        overwrite=overwrite,
        progress=lambda done, total: progress("writing", done, total),
    )


def _changed_parameters(model: nn.Module, ops: set[str], quantized: Collection[str]) -> dict[str, Tensor]:
    """Parameters of smoothed ops that are stored in 16 bits: weights of norms, biases of linear layers."""
    return {
        name: parameter.detach().contiguous()
        for op in sorted(ops)
        for name, parameter in model.get_submodule(op).named_parameters(prefix=op, recurse=False)
        if name.removesuffix(".weight") not in quantized
    }


def _quantize_vision(model: nn.Module, work: plan.Plan, progress: Progress) -> dict[str, tuple]:
    """The vision tower's linear layers, rounded without data; the engine scales their inputs token by token."""
    if work.vision_method is None:
        return {}
    found: dict[str, tuple] = {}
    for done, group in enumerate(work.vision_groups, start=1):
        weights = {name: model.get_parameter(f"{name}.weight") for name in group.linears}
        result = solve_layer([group], weights, {}, work.vision_method, next(iter(weights.values())).dtype)
        found |= {name: (weight, work.vision_method.scheme, None) for name, weight in result.weights.items()}
        progress("quantizing the vision tower", done, len(work.vision_groups))
    return found

"""Collect the statistics of a model once, for every scheme: the run of `vlmcompress calibrate`.

Blocks are observed one after the other, and a block's statistics are written once all samples have run through it, so memory
holds those of one block. The model is not changed. Finished work of a killed run stays next to STATS, as in `quantize`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vlmcompress import models
from vlmcompress.export import manifest
from vlmcompress.models import VLM, Group, decoder_blocks, head_group
from vlmcompress.models.devices import full_float32
from vlmcompress.numerics.statistics.gradients import Gradients
from vlmcompress.numerics.statistics.inputs import CROSS, STORABLE
from vlmcompress.quantization.calibration import entropy
from vlmcompress.quantization.calibration.block_store import block_name
from vlmcompress.quantization.calibration.gradient_pass import NO_ANSWER, kept_gradients
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.calibration.statistics_folder import (
    NAME,
    SCHEMA_VERSION,
    processor_identity,
    save_statistics,
)
from vlmcompress.quantization.inputs import (
    Inputs,
    Result,
    derive_source,
    fit_reducer,
    naming,
    read_inputs,
    run_settings,
)
from vlmcompress.recipe import Recipe, presets
from vlmcompress.recipe import adapter as adapters
from vlmcompress.recipe.allocation import RULES
from vlmcompress.utils import distributed, folders, identity
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.progress import Progress, phase, phase_seconds, silent, timed_phases
from vlmcompress.utils.registry import SCHEMES
from vlmcompress.utils.schema import Number
from vlmcompress.utils.work_folder import RUN, WorkFolder, locked_folder

KINDS = STORABLE | {"entropy", "gradient"}
"""What can be collected: statistics of groups of layers, entropies of blocks (`calibration.entropy`), and gradients of the
answers' loss (`calibration.gradient_pass`)."""


def statistics_needed(names: Collection[str]) -> frozenset[str]:
    """Statistics that schemes with their default options, rules that share out bits, and balances read.

    Args:
        names: names of any of these; a name with several meanings (`mbq`, `qvlm`) counts for all of them.

    Raises:
        UserError: an unknown name, or names that need no statistics.
    """
    needs: set[str] = set()
    for name, options in (presets.resolve_scheme(name) for name in names):
        choices = {*SCHEMES.names(), *RULES}
        if name not in choices:
            raise UserError(f"--for: no scheme or rule for bits '{name}'{did_you_mean(name, choices)}")
        if name in SCHEMES.names():
            module = SCHEMES.get(name)
            needs |= QuantMethod(module, module.Options(**options)).needs.statistics
        if name in RULES:
            needs |= {"gram", *RULES[name].needs}
    if CROSS in needs:
        raise UserError(
            f"--for {','.join(names)}: the cross-Gram matrix depends on the blocks quantized before and cannot be collected "
            "once for all; quantize with --calib instead"
        )
    if not needs:
        raise UserError(f"--for {','.join(names)}: needs no statistics; quantize without --stats")
    return frozenset(needs)


def calibrate(
    recipe: Recipe,
    *,
    needs: Collection[str] = STORABLE,
    likes: Collection[str] = (),
    read: Path | None = None,
    restart: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Result:
    """Collect the statistics of `recipe.model` into `recipe.out`.

    Args:
        recipe: resolved recipe; its model, data, seed, reducer and `kv_cache` decide what is collected.
        needs: the statistics to collect, a subset of `KINDS`; the default suffices for every scheme with default options.
            `entropy` needs scikit-learn, `gradient` answers and a backward pass.
        likes: more of `KINDS`, which are collected only if the data allow it.
        read: folder of the derived (rotated, dequantized or merged) model; None: it is written if the recipe needs one.
        restart: begin anew where an interrupted run left finished work, which is used otherwise.
        overwrite: replace existing statistics.
        progress: called with (label, done, total).

    Raises:
        UserError: bad input; nothing was written.
    """
    if "entropy" in needs and importlib.util.find_spec("sklearn") is None:
        raise UserError("entropy needs scikit-learn; pip install '.[compress]' in the checkout of vlmcompress")
    claim = locked_folder(recipe.model, recipe.output, overwrite=overwrite, mark=NAME, restart=restart)
    with timed_phases(), claim as work, distributed.process_group():
        work.expect(run_settings("calibrate", recipe))
        derived = None if read else derive_source(recipe, work, progress)
        with phase("loading"):
            dtype = None if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
            path = read or (derived.path if derived else recipe.model)
            vlm = models.load(path, dtype=dtype, trust_remote_code=recipe.trust_remote_code)
            vlm = replace(vlm, path=recipe.model)
        whole = read_inputs(recipe, vlm, "vlmcompress calibrate", progress)
        reducer = fit_reducer(recipe.reduce, vlm, whole.samples, progress)
        inputs = whole.reduced(reducer, progress)
        vlm, origin = inputs.vlm, inputs.origin
        assert origin is not None
        if "gradient" in needs and not origin["tokens"]["answer"]:
            raise UserError(NO_ANSWER)
        needs = frozenset(needs).union(likes if origin["tokens"]["answer"] else set(likes) - {"gradient"})
        blocks = decoder_blocks(vlm.model, vlm.spec)
        steps = [*blocks, [head_group(vlm.spec, len(blocks))]]
        if "gram" in needs:
            grams = gram_bytes(vlm, steps, sum(count > 0 for count in origin["tokens"].values()))
            remedy = "choose another folder or leave out Gram matrices with --needs absmax,absmean"
            kept = sum(path.stat().st_size for path in work.folder.glob("*.safetensors"))
            folders.require_space(work.out, grams - kept, remedy)
        weights = identity.weights_hash(recipe.model)
        settings = {
            "samples": origin,
            "reducer": reducer and reducer.plain(),
            "needs": sorted(needs),
            "weights": weights,
        }
        work.begin(settings)
        with torch.inference_mode(False), torch.no_grad(), naming(whole.names):
            if "gradient" in needs:
                with phase("gradients"):
                    kept_gradients(work, vlm, inputs.samples, progress)
            collect(recipe, inputs, steps, work, needs, progress)
        if distributed.is_main():
            facts = _description(recipe, whole.vlm, weights, steps) | {"needs": sorted(needs), RUN: work.run}
            facts |= {"calibration": origin | {"prefix": "float"}, "timing": phase_seconds()}
            if "entropy" in needs:
                entropies = _entropies(work)
                measures = next(iter(entropies.values()), {})  # None: a block without linear layers
                of_blocks = {m: [entropies.get(layer, {}).get(m) for layer in range(len(blocks))] for m in measures}
                facts["entropy"] = of_blocks
            if "gradient" in needs:
                facts["gradients"] = work.read_note("gradients", Gradients)
            with folders.new_folder(work.out) as folder:
                for name in (block_name(layer) for layer, groups in enumerate(steps) if groups):
                    with work.opened(name):  # raises for a file of another run
                        pass
                    folders.link_or_copy(work.path(name), folder / work.path(name).name)
                facts["files"] = manifest.hash_files(folder)
                (folder / NAME).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            work.remove()
        distributed.barrier()
        return Result(work.out, facts if distributed.is_main() else {})


@full_float32()
def collect(
    recipe: Recipe,
    inputs: Inputs,
    blocks: list[list[Group]],
    work: WorkFolder,
    needs: frozenset[str] = STORABLE,
    progress: Progress = silent,
) -> None:
    """Collect statistics of the decoder's blocks in `inputs.vlm`, which is not changed, and store them in `work`.

    Once the blocks' inputs are captured, only `modality` is left of each sample.
    """
    filled = [layer for layer, groups in enumerate(blocks) if groups]
    measured = "entropy" not in needs or set(filled) <= _entropies(work).keys()
    if measured and all(work.has(block_name(layer)) for layer in filled):
        return
    from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks

    rows = entropy.TOKENS if "entropy" in needs else 0
    spec = CaptureSpec(
        needs & STORABLE,
        kv_cache=bool(recipe.kv_cache),
        sampled_rows=rows,
        seed=recipe.seed,
        all_experts=recipe.calibrate.all_experts,
    )
    before = None

    def finished(layer: int) -> bool:
        return not rows and work.has(block_name(layer))  # entropies compare a block with the one before

    captures = capture_blocks(
        inputs.vlm, blocks, inputs.samples, spec, finished=finished, release=True, progress=progress
    )
    for layer, captured in captures:
        if captured is None:
            continue
        if distributed.is_main() and not work.has(block_name(layer)):
            with phase("storing"):
                save_statistics(work, layer, captured.stats, captured.kv_ranges)
        captured.stats.clear()  # frees them before the next block's are collected
        if captured.rows is not None and distributed.is_main():
            with phase("entropy"):
                paired = captured.rows[: entropy.PAIRED]
                if layer not in (entropies := _entropies(work)):
                    luq, qvlm = entropy.cluster_entropy(captured.rows), entropy.conditional_entropy(before, paired)
                    work.write_note("entropy", entropies | {layer: {"luq": luq, "qvlm": qvlm}})
                before = paired


def _entropies(work: WorkFolder) -> dict[int, dict[str, float]]:
    """The entropies measured so far: block -> measure -> bits."""
    return {int(layer): bits for layer, bits in (work.read_note("entropy", dict[str, dict[str, Number]]) or {}).items()}


def _description(recipe: Recipe, vlm: VLM, weights_sha256: str, blocks: Sequence[Sequence[Group]]) -> dict[str, Any]:
    """The description of model and software for `statistics.json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "created_by": identity.versions(),
        "model": {
            "family": vlm.spec.family,
            **identity.source_identity(vlm.path),
            "weights_sha256": weights_sha256,
        },
        "processor": processor_identity(vlm.path),
        "blocks": [{group.name: list(group.linears) for group in groups} for groups in blocks],
        "settings": {
            **recipe.calibrate.model_dump(include={"samples", "max_length", "all_experts"}),
            "seed": recipe.seed,
        },
        "kv_cache": bool(recipe.kv_cache),
        **({"rotate": recipe.rotation} if recipe.rotation else {}),
        **({"adapter": adapters.adapter_sha256(recipe.adapter)} if recipe.adapter else {}),
    }


def gram_bytes(vlm: VLM, blocks: Sequence[Sequence[Group]], modalities: int) -> int:
    """Bytes of the Gram matrices on disk: nearly half of `4 in^2` for each group and modality."""
    widths = [vlm.model.get_parameter(f"{g.linears[0]}.weight").shape[1] for groups in blocks for g in groups]
    return 2 * modalities * sum(width**2 for width in widths)

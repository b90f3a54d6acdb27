"""Quantize a decoder block by block: during a forward pass over calibration data, from statistics, or without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmcompress.calibration.block_store import BlockStore
from vlmcompress.calibration.devices import accelerator, trim
from vlmcompress.calibration.solve import BlockResult, QuantMethod, apply, solve_block
from vlmcompress.calibration.statistics_folder import Statistics
from vlmcompress.common import distributed
from vlmcompress.common.progress import Progress, phase, silent
from vlmcompress.models import VLM, Group
from vlmcompress.statistics.inputs import CROSS, NEEDS, GroupStats

if TYPE_CHECKING:
    from vlmcompress.calibration.gradient_pass import Fisher
    from vlmcompress.calibration.observe import Seen


def compress(
    vlm: VLM,
    blocks: list[list[Group]],
    method: QuantMethod,
    batches: list[dict[str, Tensor]],
    store: BlockStore,
    *,
    kv_cache: bool = False,
    all_experts: bool = False,
    fisher: Fisher = "labels",
    seed: int = 0,
    lean: bool = False,
    progress: Progress = silent,
) -> None:
    """Quantize the decoder's blocks in `vlm.model` and keep the results in `store`.

    With calibration data each block (each group, where the scheme says so) is observed behind what is quantized already.

    Args:
        all_experts: every expert of a mixture is shown all tokens.
        fisher: what the backward pass propagates, where the method needs one (`calibration.gradient_pass`).
        seed: of its signs.
        lean: let go of a block's linear weights when it has passed on what it puts out. What is loaded is mapped from files
            until it is changed, so memory holds the weights of one block, however large the model.
    """
    if not batches:
        return solve_blocks(vlm.model, blocks, method, store, lean=lean, progress=progress)  # smooths nothing
    from vlmcompress.calibration.gradient_pass import kept_sensitivities
    from vlmcompress.calibration.observe import Wanted, observe

    with phase("gradients"):
        asked = (store, vlm, blocks, batches, progress, fisher, seed)
        known = kept_sensitivities(*asked) if "gradient" in method.needs.statistics else {}
    with phase("searching"):
        method, scales, weights = _searched(vlm, blocks, batches, method, known, progress)
    more = {"weights": weights, "all_experts": all_experts, "stepwise": method.needs.prefix == "groups"}
    wanted = Wanted(_needs(method), kv_cache=kv_cache, **more)
    offset = vlm.spec.norm_offset
    finished: dict[str, Any] = {}
    whole = BlockResult()
    for layer, seen in observe(vlm, blocks, batches, wanted, twice=True, known=store.has, progress=progress):
        modules = _modules(vlm.model, blocks[layer])
        linears = {name: modules[name] for group in blocks[layer] for name in group.linears}
        if lean and linears.keys() != finished.keys():
            _let_go(finished)
        finished = linears
        if seen is None:
            apply(store.load(layer), modules, offset)
            continue
        for group, one in seen.stats.items():
            one.sensitivity = known.get((layer, group))
        groups = [group for group in blocks[layer] if group.name in seen.stats]
        result = _of_seen(vlm, layer, groups, seen, method, scales)
        apply(result, modules, offset)
        whole.add(result)
        if groups[-1] is blocks[layer][-1]:
            _save(store, layer, whole)
            whole = BlockResult()
    if lean:
        _let_go(finished)


def _searched(
    vlm: VLM,
    blocks: list[list[Group]],
    batches: list[dict[str, Tensor]],
    method: QuantMethod,
    known: Mapping[tuple[int, str], Any],
    progress: Progress,
) -> tuple[QuantMethod, dict[tuple[int, str], Tensor], Any]:
    """The method with its clipped ranges, scales by block and group, and weights of tokens, where they come of the model."""
    scales: dict[tuple[int, str], Tensor] = {}
    searches = method.needs.searches
    if "block_scales" in searches:
        from vlmcompress.calibration.block_search import search_blocks

        scales = search_blocks(vlm, blocks, batches, method, known)
    if "ranges" in searches:
        from vlmcompress.calibration import block_clip

        method = block_clip.search(vlm, blocks, batches, method, progress)
    if "token_weights" not in searches:
        return method, scales, []
    from vlmcompress.calibration.token_weights import token_weights

    return method, scales, token_weights(vlm, blocks, method, batches, progress)


def _of_seen(
    vlm: VLM, layer: int, groups: list[Group], seen: Seen, method: QuantMethod, scales: Mapping[tuple[int, str], Tensor]
) -> BlockResult:
    """What becomes of the groups of a block that were observed; `scales`: those found beforehand, by block and group."""
    from vlmcompress.calibration import finalists

    own: dict[str, Any] = {name: s.to(vlm.model.device) for (block, name), s in scales.items() if block == layer}
    with phase("searching"):
        chosen = finalists.choose(vlm, layer, groups, seen.batches, seen.stats, method)
    modules = _modules(vlm.model, groups)
    result = _solved(groups, modules, seen.stats, method, own | chosen, vlm.spec.norm_offset)
    result.kv_ranges |= seen.kv_ranges
    return result


def _needs(method: QuantMethod) -> frozenset[str]:
    """The statistics that are collected for a method: those that it reads, and what errors are reported by."""
    return frozenset(
        method.needs.statistics & {*NEEDS, CROSS} | {"gram"} | ({"absmax"} if method.rounds_inputs else set())
    )


def solve_blocks(
    model: nn.Module,
    blocks: list[list[Group]],
    method: QuantMethod,
    store: BlockStore,
    statistics: Statistics | None = None,
    *,
    norm_offset: float = 0.0,
    kv_cache: bool = False,
    lean: bool = False,
    progress: Progress = silent,
) -> None:
    """Quantize the decoder's blocks, each on its own: without data, or from statistics of the unquantized model.

    Norms compute `x * (norm_offset + weight)`. No forward pass. Arithmetic is done on the accelerator where there is one,
    block by block. `lean`: of the model change norms and biases alone.
    """
    device = str(accelerator() or "cpu")
    for layer, groups in enumerate(blocks):
        modules = _modules(model, groups)
        if groups and store.has(layer):
            apply(store.load(layer, weights=not lean), modules, norm_offset)
        elif groups:
            with phase("reading statistics"):
                stats, kv_ranges = statistics.load(layer, device) if statistics else ({}, {})
            result = _solved(groups, modules, stats, method, {}, norm_offset, device)
            result.kv_ranges |= kv_ranges if kv_cache else {}
            _save(store, layer, result)
            if lean:
                result.weights.clear()
            apply(result, modules, norm_offset)
        progress("quantizing", layer + 1, len(blocks))


def _modules(model: nn.Module, groups: Sequence[Group]) -> dict[str, Any]:
    """A block's linear layers, the ops before them and what else reads these, by memory name."""
    names = {name for group in groups for name in (*group.linears, *group.kept, group.smooth) if name}
    return {name: model.get_submodule(name) for name in names}


def _solved(
    groups: Sequence[Group],
    modules: Mapping[str, Any],
    stats: dict[str, GroupStats],
    method: QuantMethod,
    scales: Mapping[str, Tensor],
    norm_offset: float,
    device: str | None = None,
) -> BlockResult:
    """What a block becomes, computed on `device` or where its weights are."""
    weights = {name: modules[name].weight.detach().to(device) for group in groups for name in group.linears}
    norms = {
        g.smooth: modules[g.smooth].weight.detach().to(device) for g in groups if g.smooth and g.smooth_kind == "norm"
    }
    with phase("solving"):
        dtype = next(iter(weights.values())).dtype
        return solve_block(groups, weights, stats, method, dtype, scales, norms, norm_offset)


def _save(store: BlockStore, layer: int, result: BlockResult) -> None:
    with phase("storing"):
        if distributed.is_main():
            store.save(layer, result)


def _let_go(linears: Mapping[str, Any]) -> None:
    """Leave of quantized layers' weights the shape alone."""
    for module in linears.values():
        module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
    trim()

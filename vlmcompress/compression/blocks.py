"""Quantize a decoder block by block: during a forward pass over calibration data, from statistics, or without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.blocks.solve import BlockResult, Method, apply, solve_block
from vlmcompress.blocks.store import BlockStore
from vlmcompress.calibration.statistics_folder import Statistics
from vlmcompress.common import team
from vlmcompress.common.phases import phase
from vlmcompress.common.progress import Progress, silent
from vlmcompress.models import VLM, Group
from vlmcompress.statistics.inputs import NEEDS, GroupStats


def compress(
    vlm: VLM,
    blocks: list[list[Group]],
    method: Method,
    batches: list[dict[str, Tensor]],
    store: BlockStore,
    *,
    kv_cache: bool = False,
    progress: Progress = silent,
) -> None:
    """Quantize the decoder's blocks in `vlm.model` and keep the results in `store`.

    With calibration data each block is observed behind those that are quantized already; without, each stands alone.
    """
    if not batches:
        return solve_blocks(vlm.model, blocks, method, store, progress=progress)  # smooths nothing
    from vlmcompress.calibration import block_clip
    from vlmcompress.calibration.block_search import search_blocks
    from vlmcompress.calibration.gradient_pass import kept_sensitivities
    from vlmcompress.calibration.observe import Wanted, observe
    from vlmcompress.calibration.token_weights import token_weights

    with phase("gradients"):
        known = kept_sensitivities(store, vlm, blocks, batches, progress) if "gradient" in method.needs else {}
    with phase("searching"):
        scales = search_blocks(vlm, blocks, batches, method, known) if method.by_block else {}
        if method.joint:
            method = block_clip.search(vlm, blocks, batches, method, progress)
        weights = token_weights(vlm, blocks, method, batches, progress) if method.by_token else []
    activations = method.scheme and method.scheme.activations
    needs = method.needs & NEEDS | {"gram"} | ({"absmax"} if activations else set())
    wanted = Wanted(needs, kv_cache=kv_cache, weights=weights)
    offset = vlm.spec.norm_offset
    for layer, seen in observe(vlm, blocks, batches, wanted, twice=True, known=store.has, progress=progress):
        modules = _modules(vlm.model, blocks[layer])
        if seen is None:
            apply(store.load(layer), modules, offset)
            continue
        for group, one in seen.stats.items():
            one.sensitivity = known.get((layer, group))
        own = {name: scale.to(vlm.model.device) for (block, name), scale in scales.items() if block == layer}
        result = _solved(blocks[layer], modules, seen.stats, method, own, offset)
        result.kv_ranges |= seen.kv_ranges
        _keep(store, layer, result, modules, offset)


def solve_blocks(
    model: nn.Module,
    blocks: list[list[Group]],
    method: Method,
    store: BlockStore,
    statistics: Statistics | None = None,
    *,
    norm_offset: float = 0.0,
    kv_cache: bool = False,
    progress: Progress = silent,
) -> None:
    """Quantize the decoder's blocks, each on its own: without data, or from statistics of the unquantized model.

    Norms compute `x * (norm_offset + weight)`. No forward pass. Arithmetic is done on the accelerator where there is one,
    block by block.
    """
    device = str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"
    for layer, groups in enumerate(blocks):
        modules = _modules(model, groups)
        if groups and store.has(layer):
            apply(store.load(layer), modules, norm_offset)
        elif groups:
            with phase("reading statistics"):
                stats, kv_ranges = statistics.load(layer, device) if statistics else ({}, {})
            result = _solved(groups, modules, stats, method, {}, norm_offset, device)
            result.kv_ranges |= kv_ranges if kv_cache else {}
            _keep(store, layer, result, modules, norm_offset)
        progress("quantizing", layer + 1, len(blocks))


def _modules(model: nn.Module, groups: Sequence[Group]) -> dict[str, Any]:
    """A block's linear layers and the ops before them, by memory name."""
    names = {name for group in groups for name in (*group.linears, group.smooth) if name}
    return {name: model.get_submodule(name) for name in names}


def _solved(
    groups: Sequence[Group],
    modules: Mapping[str, Any],
    stats: dict[str, GroupStats],
    method: Method,
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


def _keep(store: BlockStore, layer: int, result: BlockResult, modules: Mapping[str, Any], norm_offset: float) -> None:
    """Put a block's result on disk and into the model."""
    with phase("storing"):
        if team.first():
            store.save(layer, result)
        apply(result, modules, norm_offset)

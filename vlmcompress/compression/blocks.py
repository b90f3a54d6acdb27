"""Quantize a decoder block by block: during a forward pass over calibration data, from statistics, or without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.blocks.solve import Method, apply, solve_block
from vlmcompress.blocks.store import BlockStore
from vlmcompress.calibration.statistics_folder import Statistics
from vlmcompress.common.progress import Progress, silent
from vlmcompress.models import VLM, Group


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

    With calibration data the blocks go through llm-compressor's sequential pipeline, each behind those that are quantized
    already; without, each stands alone.
    """
    if not batches:
        return solve_blocks(vlm.model, blocks, method, store, progress=progress)  # smooths nothing
    from vlmcompress.calibration import block_clip
    from vlmcompress.calibration.block_search import search_blocks
    from vlmcompress.calibration.gradient_pass import kept_sensitivities
    from vlmcompress.calibration.sequential import BlockModifier, alike, attention_modules, run_oneshot
    from vlmcompress.calibration.token_weights import token_weights

    known = kept_sensitivities(store, vlm, blocks, batches, progress) if "gradient" in method.needs else {}
    scales = search_blocks(vlm, blocks, batches, method, known) if method.by_block else {}
    if method.joint:
        method = block_clip.search(vlm, blocks, batches, method, progress)
    modifier = BlockModifier(
        blocks=blocks,
        attention=attention_modules(vlm) if kv_cache else {},
        method=method,
        sensitivity=known,
        token_weights=token_weights(vlm, blocks, method, alike(batches), progress) if method.by_token else [],
        scales=scales,
        store=store,
        batches=len(batches),
        progress=progress,
    )
    run_oneshot(vlm, batches, [modifier], models.layer_class(vlm.model, vlm.spec))


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
        names = {name for group in groups for name in (*group.linears, group.smooth) if name}
        modules: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        if groups and store.has(layer):
            apply(store.load(layer), modules, norm_offset)
        elif groups:
            weights = {name: modules[name].weight.to(device) for group in groups for name in group.linears}
            stats, kv_ranges = statistics.load(layer, device) if statistics else ({}, {})
            norms = {
                g.smooth: modules[g.smooth].weight.to(device) for g in groups if g.smooth and g.smooth_kind == "norm"
            }
            dtype = next(iter(weights.values())).dtype
            result = solve_block(groups, weights, stats, method, dtype, None, norms, norm_offset)
            result.kv_ranges |= kv_ranges if kv_cache else {}
            store.save(layer, result)
            apply(result, modules, norm_offset)
        progress("quantizing", layer + 1, len(blocks))

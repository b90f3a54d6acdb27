"""Quantize the blocks of a decoder one after the other, and keep the results in the run's work folder.

`quantize_blocks` does it in a pass over calibration samples, where each block is captured after those that are quantized
already; `solve_blocks` from statistics of the unquantized model or without data, where no block is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmcompress.models import VLM, Group
from vlmcompress.models.devices import accelerator, full_float32, trim
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.numerics.statistics.inputs import CROSS, NEEDS, GroupStats
from vlmcompress.quantization.calibration.block_store import block_name, load_block, save_block
from vlmcompress.quantization.calibration.solve import BlockResult, QuantMethod, apply, solve_block
from vlmcompress.quantization.calibration.statistics_folder import Statistics
from vlmcompress.utils import distributed
from vlmcompress.utils.progress import Progress, phase, silent
from vlmcompress.utils.work_folder import WorkFolder

if TYPE_CHECKING:
    from vlmcompress.quantization.calibration.input_recorder import BlockCapture


@full_float32()
def quantize_blocks(
    vlm: VLM,
    blocks: list[list[Group]],
    method: QuantMethod,
    samples: list[dict[str, Tensor]],
    work: WorkFolder,
    *,
    kv_cache: bool = False,
    all_experts: bool = False,
    lean: bool = False,
    release: bool = False,
    progress: Progress = silent,
) -> None:
    """Quantize the decoder's blocks in `vlm.model` and keep the results in `work`.

    Args:
        samples: from `encode`, one sample each; none: blocks are quantized without data.
        all_experts: every expert of a mixture is shown all tokens.
        lean: free a block's linear weights when its output has been passed on. What is loaded is mapped from files until it is
            changed, so memory holds the weights of one block, however large the model.
        release: leave nothing of `samples` but `modality` when the blocks' inputs are captured.
    """
    if not samples:
        return solve_blocks(vlm.model, blocks, method, work, lean=lean, progress=progress)  # smooths nothing
    from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
    from vlmcompress.quantization.calibration.gradient_pass import kept_sensitivities

    sensitivities: Mapping[tuple[int, str], Sensitivity] = {}
    with phase("gradients"):
        if "gradient" in method.needs.statistics:
            sensitivities = kept_sensitivities(work, vlm, blocks, samples, progress)
    with phase("searching"):
        searched = _search(vlm, blocks, samples, method, sensitivities, progress)
    method, norm_offset = searched.method, vlm.spec.norm_offset
    # Next to what the method reads: what errors are reported by, and the rounding of inputs.
    statistics = method.needs.statistics & {*NEEDS, CROSS} | {"gram"} | ({"absmax"} if method.rounds_inputs else set())
    spec = CaptureSpec(statistics, method.needs.prefix, kv_cache, all_experts=all_experts)

    def passed(layer: int) -> None:
        if lean:
            _free([vlm.model.get_submodule(name) for group in blocks[layer] for name in group.linears])

    whole = BlockResult()
    options: dict[str, Any] = {
        "finished": lambda layer: work.has(block_name(layer)),
        "passed": passed,
        "release": release,
        "progress": progress,
    }
    for layer, captured in capture_blocks(vlm, blocks, samples, spec, **options):
        modules = _modules(vlm.model, blocks[layer])
        if captured is None:
            apply(load_block(work, layer), modules, norm_offset)
            continue
        groups = [group for group in blocks[layer] if group.name in captured.stats]
        result = _solve_captured(vlm, layer, groups, captured, searched, sensitivities)
        apply(result, modules, norm_offset)
        whole.add(result)
        if groups[-1] is blocks[layer][-1]:  # with the prefix "groups" a block is captured in parts
            _save(work, layer, whole)
            whole = BlockResult()


def _solve_captured(
    vlm: VLM,
    layer: int,
    groups: list[Group],
    captured: BlockCapture,
    searched: _SearchResult,
    sensitivities: Mapping[tuple[int, str], Sensitivity],
) -> BlockResult:
    """Solve the groups of a block that were captured, with what the searches before found for them."""
    method = searched.method
    device = vlm.model.get_parameter(
        f"{groups[0].linears[0]}.weight"
    ).device  # the block's, which is not the whole model's
    for name, stats in captured.stats.items():
        stats.sensitivity = sensitivities.get((layer, name))
    scales = {name: scale.to(device) for (block, name), scale in searched.scales.items() if block == layer}
    result = _solve(groups, _modules(vlm.model, groups), captured.stats, method, vlm.spec.norm_offset, scales)
    result.kv_ranges |= captured.kv_ranges
    return result


@full_float32()
def solve_blocks(
    model: nn.Module,
    blocks: list[list[Group]],
    method: QuantMethod,
    work: WorkFolder,
    statistics: Statistics | None = None,
    *,
    norm_offset: float = 0.0,
    kv_cache: bool = False,
    lean: bool = False,
    progress: Progress = silent,
) -> None:
    """Quantize the decoder's blocks, each on its own: without data, or from statistics of the unquantized model.

    Arithmetic is done on the accelerator where there is one, block by block.

    Args:
        norm_offset: norms compute `x * (norm_offset + weight)`.
        lean: only norms and biases of the model are changed.
    """
    device = str(accelerator() or "cpu")
    for layer, groups in enumerate(blocks):
        modules = _modules(model, groups)
        if groups and work.has(block_name(layer)):
            apply(load_block(work, layer, weights=not lean), modules, norm_offset)
        elif groups:
            with phase("reading statistics"):
                stats, kv_ranges = statistics.load(layer, device) if statistics else ({}, {})
            result = _solve(groups, modules, stats, method, norm_offset, {}, device)
            result.kv_ranges |= kv_ranges if kv_cache else {}
            _save(work, layer, result)
            if lean:
                result.weights.clear()
            apply(result, modules, norm_offset)
        progress("quantizing", layer + 1, len(blocks))


@dataclass(frozen=True)
class _SearchResult:
    """What the searches before the first block found.

    Attributes:
        method: with the clipping ranges that were searched.
        scales: (block, group) -> smoothing scale `[in]`.
    """

    method: QuantMethod
    scales: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)


def _search(
    vlm: VLM,
    blocks: list[list[Group]],
    samples: list[dict[str, Tensor]],
    method: QuantMethod,
    sensitivities: Mapping[tuple[int, str], Sensitivity],
    progress: Progress,
) -> _SearchResult:
    """Do the searches that the method needs before the first block (`schemes.Needs`)."""
    searches, scales = method.needs.searches, dict[tuple[int, str], Tensor]()
    if "block_scales" in searches:
        from vlmcompress.quantization.calibration.block_search import search_blocks

        scales = search_blocks(vlm, blocks, samples, method, sensitivities)
    if "ranges" in searches:
        from vlmcompress.quantization.calibration import block_clip

        method = block_clip.search_ranges(vlm, blocks, samples, method, progress)
    return _SearchResult(method, scales)


def _modules(model: nn.Module, groups: Sequence[Group]) -> dict[str, Any]:
    """The groups' linear layers, the ops before them and the layers that read these, too, by memory name."""
    names = {name for group in groups for name in (*group.linears, *group.kept, group.smooth) if name}
    return {name: model.get_submodule(name) for name in names}


def _solve(
    groups: Sequence[Group],
    modules: Mapping[str, Any],
    stats: dict[str, GroupStats],
    method: QuantMethod,
    norm_offset: float,
    scales: Mapping[str, Tensor],
    device: str | None = None,
) -> BlockResult:
    """Solve groups of a block on `device`, or where its weights are. `scales`: smoothing scales that were searched before."""
    weights = {name: modules[name].weight.detach().to(device) for group in groups for name in group.linears}
    norms = {
        g.smooth: modules[g.smooth].weight.detach().to(device) for g in groups if g.smooth and g.smooth_kind == "norm"
    }
    with phase("solving"):
        dtype = method.scale_dtype or next(iter(weights.values())).dtype
        return solve_block(groups, weights, stats, method, dtype, scales, norms, norm_offset)


def _save(work: WorkFolder, layer: int, result: BlockResult) -> None:
    with phase("storing"):
        if distributed.is_main():
            save_block(work, layer, result)


def _free(linears: Sequence[Any]) -> None:
    """Replace the weights of quantized layers by tensors on the meta device."""
    for module in linears:
        module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
    trim()

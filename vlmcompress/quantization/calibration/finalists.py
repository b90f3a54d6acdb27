"""The best smoothing scales of AWQ's search on statistics, compared by the output of attention or MLP around their layers.

`schemes.awq` ranks scales by the squared error of each linear layer's own output, and that of q, k and v is not attention's:
an error of the keys that all of them share is lost in the softmax, and one of the values comes through as it is. The published
search runs the module again for each candidate, some 40 times (`calibration.block_search`). Here this is left to the few that
the Gram matrices put first, and to 1, on some of the samples:

    L(s) = sum over tokens t of w_t |M_s(x_t) - M(x_t)|^2,      M: attention or MLP;  M_s: with Q(W s) / s for its layers' W

behind the blocks that are quantized already, with weights as they will be: clipped, if that is asked for, as ranges that suit
one scale do not tell what another gains by clipping (`clip_sweeps` come later). `w_t` is 1, or the weight of the
token's modality under a balance. A group that a linear layer feeds (o, down) has no other layer behind it within its module, so
that its Gram matrix says the same, over all tokens: its scale is chosen as ever. So are those of experts, which are not called
with all tokens.

Memory: the inputs and outputs of attention and MLP for the samples looked at. Cost: `finalists + 1` runs of both for these, a
quarter of the tokens and at most some 8,000, and as many searches for clipped ranges, besides one run of the block.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.models import VLM, Group
from vlmcompress.models.devices import replaced_forward, widened
from vlmcompress.numerics.statistics.balance import MODALITIES, shares
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization import schemes as quantizers
from vlmcompress.quantization.calibration.block_inputs import Batch
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.schemes import awq
from vlmcompress.utils import distributed

LEAST, MOST = 2048, 8192  # tokens that are looked at, where a quarter of all is less or more


@dataclass
class _Calls:
    """The arguments and outputs of a module, for each batch that is looked at."""

    arguments: list[tuple[tuple, dict[str, Any]]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def choose(
    vlm: VLM,
    layer: int,
    groups: Sequence[Group],
    batches: Sequence[Batch],
    stats: Mapping[str, GroupStats],
    method: QuantMethod,
) -> dict[str, Tensor | None]:
    """The scale of each group of a block whose finalists are compared: group name -> `[in]`, or None where 1 is best.

    Args:
        layer: number of the block, which is not quantized yet, and is where it runs.
        batches: all samples (of several workers this one's), at the input of the block.
        stats: by group.
    """
    compared = [group for group in groups if _compared(group, method)]
    if not compared:
        return {}
    block, chosen = vlm.model.get_submodule(models.decoder_layers(vlm.model, vlm.spec)[layer]), _some(batches)
    calls = _watched(vlm.model, block, layer, compared, chosen)
    best: dict[str, Tensor | None] = {}
    for group in compared:
        module_calls, group_stats, group_method = calls[_around(group)], stats[group.name], method.of(group)
        if len(module_calls.outputs) == len(chosen):
            weights = [_weights(batch, group_stats, group_method) for batch in chosen]
            best[group.name] = _best(vlm.model, group, module_calls, weights, group_stats, group_method)
    return best


def _compared(group: Group, method: QuantMethod) -> bool:
    """Whether a group's finalists are compared: its module turns its layers' outputs into something else."""
    return (
        "finalists" in method.of(group).needs.searches
        and group.smooth is not None
        and group.smooth_kind == "norm"
        and group.expert is None
    )


def _around(group: Group) -> str:
    """The module that a group's first layer is in."""
    return group.linears[0].rpartition(".")[0]


def _some(batches: Sequence[Batch]) -> list[Batch]:
    """Batches evenly spaced from the shortest samples to the longest, with a quarter of the tokens."""
    sizes = [int((batch.modality > 0).sum()) for batch in batches]
    tokens = min(max(sum(sizes) / 4, LEAST), MOST)
    count = max(1, min(len(batches), math.ceil(len(batches) * tokens / max(1, sum(sizes)))))
    return [batches[math.floor((k + 0.5) * len(batches) / count)] for k in range(count if batches else 0)]


def _watched(
    model: nn.Module, block: nn.Module, layer: int, groups: Sequence[Group], batches: Sequence[Batch]
) -> dict[str, _Calls]:
    """Record the arguments and outputs of the modules around `groups` while the block runs, by name."""
    calls = {_around(group): _Calls() for group in groups}
    run, device = widened(block), next(block.parameters()).device
    with contextlib.ExitStack() as hooks:
        for name, module_calls in calls.items():
            hooks.callback(
                model.get_submodule(name).register_forward_hook(_keeper(module_calls), with_kwargs=True).remove
            )
        for batch in batches:
            batch.run_block(run, layer, device)
    return calls


def _keeper(calls: _Calls) -> Callable:
    def keep(_module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not args and "hidden_states" in kwargs:
            args = (kwargs.pop("hidden_states"),)
        if args:
            calls.arguments.append((args, kwargs))
            calls.outputs.append(_first(output))

    return keep


def _weights(batch: Batch, stats: GroupStats, method: QuantMethod) -> Tensor:
    """The weight of each token's error, float32 `[samples, tokens]`: 0 of ignored ones."""
    balanced = shares(method.options.balance or "off", stats.count, stats.sensitivity)
    total = sum(stats.count.values())
    weights = [1.0 if balanced is None else balanced.get(m, 0.0) * total / max(1, stats.count[m]) for m in MODALITIES]
    return torch.tensor([0.0, *weights])[batch.modality.long()]


def _best(
    model: nn.Module,
    group: Group,
    calls: _Calls,
    tokens: Sequence[Tensor],
    stats: GroupStats,
    method: QuantMethod,
) -> Tensor | None:
    """The finalist of least loss; None where 1 has less. The module is left as it was."""
    options, module = method.options, model.get_submodule(_around(group))
    assert isinstance(options, awq.Options)
    linears: list[Any] = [model.get_submodule(name) for name in group.linears]
    dtype = linears[0].weight.dtype
    float_weights = [linear.weight.float() for linear in linears]
    scales, run = awq.finalists(float_weights, stats.balanced(options.balance), options, dtype), widened(module)
    losses = torch.zeros(1 + len(scales), dtype=torch.float64, device=float_weights[0].device)
    once = replace(options, clip_sweeps=0)
    for index, scale in enumerate([torch.ones_like(scales[0]), *scales]):
        solved = quantizers.solve(awq, [weight * scale for weight in float_weights], stats.rescaled(scale), once, dtype)
        with contextlib.ExitStack() as changes:
            for linear, quantized in zip(linears, solved.weights, strict=True):
                changes.enter_context(_computing(linear, quantized.dequantize(torch.float32).div_(scale)))
            for (args, kwargs), output, weights in zip(calls.arguments, calls.outputs, tokens, strict=True):
                error = (_first(run(*args, **kwargs)) - output).float().square().sum(-1).view_as(weights)
                losses[index] += (error * weights.to(error.device)).sum(dtype=torch.float64)
    best = int(distributed.all_sum(losses).argmin())
    return scales[best - 1] if best else None


def _computing(linear: Any, weight: Tensor) -> contextlib.AbstractContextManager[None]:
    """Have a linear layer compute in float32 with another weight `[out, in]`."""

    def forward(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.float()
        return nn.functional.linear(x.float(), weight, bias).to(x.dtype)

    return replaced_forward(linear, forward)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output

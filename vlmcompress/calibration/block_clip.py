"""Q-VLM's search for the clipping ranges of runs of decoder blocks, by the error of the run's output (`quantizers.qvlm`).

The model runs once, unquantized, and the arguments of its blocks are kept; then runs of blocks are called on their own,
with one layer group's range changed at a time. Features that a model adds between two blocks (Qwen3-VL adds visual ones
after the first blocks) are kept, too, and added again. Memory: inputs and outputs of one run for all samples, three times
over, and the blocks' other arguments (positions, masks). Time: `4 groups * (grid - 1) * sweeps` times the run's blocks for
each block, some 100 forward passes of the decoder with the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.blocks.solve import Method
from vlmcompress.calibration.devices import accelerated
from vlmcompress.calibration.entropy import PAIRED, conditional_entropy
from vlmcompress.common.progress import Progress, silent
from vlmcompress.models import VLM, Group
from vlmcompress.numerics import fake_quantize, find_params
from vlmcompress.quantizers import qvlm
from vlmcompress.statistics.reservoir import Reservoir

Key = tuple[int, str]


@dataclass
class Sample:
    """Record of the float model's pass over one calibration sample.

    Attributes:
        kept: `[tokens]`, whether a token counts.
        first: input of the first block, `[1, tokens, width]`.
        calls: for each block, its arguments besides the hidden states.
        added: for each block, the tensor that the model adds to its output before the next block; None: nothing.
    """

    kept: Tensor
    first: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: list[tuple[tuple, dict[str, Any]]] = field(default_factory=list)
    added: list[Tensor | None] = field(default_factory=list)


@torch.no_grad()
def search(
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    batches: Sequence[Mapping[str, Tensor]],
    method: Method,
    progress: Progress = silent,
) -> Method:
    """Search a range for each group of layers and return the method with them; the model's weights end as they were.

    Args:
        blocks: the groups to quantize of each decoder block.
        batches: from `encode`.
        method: a method of scheme `qvlm`; groups that get another one keep their float weights in the search.
    """
    home = vlm.model.device
    modules: list[Any] = [vlm.model.get_submodule(name) for name in models.decoder_layers(vlm.model, vlm.spec)]
    samples, entropies = record(vlm, modules, batches)
    asked = _options(method)
    runs = qvlm.partition(entropies, asked.depth)
    floats = [sample.first for sample in samples]
    quantized = list(floats)
    chosen: dict[Key, float] = {}
    for run in runs:
        wanted = floats
        for block in run:
            modules[block].to(floats[0].device)
            wanted = _call(modules, block, wanted, samples)
        groups = [[group for group in blocks[block] if method.of(group).module is qvlm] for block in run]
        with _Weights(vlm.model, [group for own in groups for group in own], method) as weights:
            chosen |= _descend(modules, run, groups, samples, quantized, wanted, weights, asked)
            for block in run:
                quantized = _call(modules, block, quantized, samples)
        for block in run:
            modules[block].to(home)
        floats = wanted
        progress("searching ranges", run[-1] + 1, len(modules))
    others = dict(method.others)
    for key, percentile in chosen.items():
        options = _options(method.others.get(key, method))
        own = {spec.name: getattr(options, spec.name) for spec in fields(qvlm.Options)}
        others[key] = Method(qvlm, qvlm.Ranged(**own, percentile=percentile))
    return replace(method, others=others)


def _options(method: Method) -> qvlm.Options:
    """Of a method of scheme `qvlm`."""
    assert isinstance(method.options, qvlm.Options)
    return method.options


def record(
    vlm: VLM, modules: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]]
) -> tuple[list[Sample], list[float]]:
    """Run the model over all samples; record the blocks' arguments, and the entropy of each block's input given the last."""
    firsts = {group.layer: group.linears[0] for group in reversed(models.resolve(vlm.model, vlm.spec))}
    inputs = [Reservoir(PAIRED, 0) for _ in modules]
    samples: list[Sample] = []
    with ExitStack() as hooks:
        for index, module in enumerate(modules):
            hooks.callback(module.register_forward_pre_hook(_before(index, samples), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(_after(samples)).remove)
            linear = vlm.model.get_submodule(firsts[index])
            hooks.callback(linear.register_forward_pre_hook(_offer(inputs[index], samples)).remove)
        device = hooks.enter_context(accelerated(vlm.model))
        for batch in batches:
            batch = {name: value.to(device) for name, value in batch.items()}
            samples.append(Sample(batch.pop("modality")[0] > 0))
            vlm.model(**batch, use_cache=False)
            samples[-1].added[-1] = None
    rows = [kept.rows() for kept in inputs]
    return samples, [conditional_entropy(a, b) for a, b in zip([None, *rows[:-1]], rows, strict=True)]


def _before(index: int, samples: list[Sample]) -> Callable:
    def note(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        sample, x = samples[-1], args[0] if args else kwargs["hidden_states"]
        if index == 0:
            sample.first = x
        else:
            difference = x - sample.added[-1]
            sample.added[-1] = difference if difference.any() else None
        sample.calls.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))

    return note


def _after(samples: list[Sample]) -> Callable:
    def note(_module: nn.Module, _args: tuple, output: Any) -> None:
        samples[-1].added.append(_hidden(output))  # the next block's input is compared with it

    return note


def _offer(kept: Reservoir, samples: list[Sample]) -> Callable:
    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        kept.update(args[0][0][samples[-1].kept.to(args[0].device)])

    return note


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _call(modules: Sequence[Any], block: int, xs: list[Tensor], samples: Sequence[Sample]) -> list[Tensor]:
    """Call a block for each sample; return its outputs as the next block gets them."""
    found = []
    for x, sample in zip(xs, samples, strict=True):
        args, kwargs = sample.calls[block]
        y, added = _hidden(modules[block](x, *args, **kwargs)), sample.added[block]
        found.append(y if added is None else y + added)
    return found


class _Weights:
    """The weights of a run's linear layers, quantized in the ranges chosen so far; restored at the end."""

    def __init__(self, model: nn.Module, groups: Sequence[Group], method: Method):
        self.formats = {(g.layer, g.name): qvlm.scheme(_options(method.of(g))).weights for g in groups}
        self.weights = {
            (group.layer, group.name): [model.get_parameter(f"{name}.weight") for name in group.linears]
            for group in groups
        }
        self.float = {key: [weight.detach().clone() for weight in own] for key, own in self.weights.items()}

    def __enter__(self) -> _Weights:
        for key in self.weights:
            self.set(key, 1.0)
        return self

    def __exit__(self, *_: object) -> None:
        for key, own in self.weights.items():
            for weight, original in zip(own, self.float[key], strict=True):
                weight.copy_(original)

    def set(self, key: Key, percentile: float) -> None:
        """Quantize a group with ranges that cover `percentile`."""
        fmt = self.formats[key]
        for weight, original in zip(self.weights[key], self.float[key], strict=True):
            ratio = qvlm.cover(original, fmt, percentile)
            params = find_params(original, fmt, scale_dtype=original.dtype, ratio=ratio)
            weight.copy_(fake_quantize(original, *params, fmt))


def _descend(
    modules: Sequence[Any],
    run: Sequence[int],
    groups: Sequence[Sequence[Group]],
    samples: Sequence[Sample],
    inputs: list[Tensor],
    wanted: Sequence[Tensor],
    weights: _Weights,
    options: qvlm.Options,
) -> dict[Key, float]:
    """Change one group's range at a time, as long as the run's output gets closer to `wanted`; the ranges are left set."""

    def error(block: int, xs: list[Tensor]) -> float:
        """Error of the run's output, from the inputs `xs` of one of its blocks on."""
        for later in range(block, run[-1] + 1):
            xs = _call(modules, later, xs, samples)
        parts = zip(xs, wanted, samples, strict=True)
        return sum(float((x - y)[0, s.kept].float().square().sum(dtype=torch.float64)) for x, y, s in parts)

    chosen = dict.fromkeys(weights.weights, 1.0)
    least = error(run[0], inputs)
    for _ in range(options.sweeps):
        before, xs = dict(chosen), inputs
        for block, own in zip(run, groups, strict=True):
            for key in ((group.layer, group.name) for group in own):
                for percentile in qvlm.percentiles(options):
                    if percentile != chosen[key]:
                        weights.set(key, percentile)
                        if (found := error(block, xs)) < least:
                            least, chosen[key] = found, percentile
                weights.set(key, chosen[key])
            xs = _call(modules, block, xs, samples)
        if chosen == before:
            break
    return chosen

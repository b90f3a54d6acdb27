"""Q-VLM's search for the clipping ranges of runs of decoder blocks, by the error of the run's output (`schemes.qvlm`).

The inputs of the blocks are captured (`calibration.block_inputs`); then runs of blocks are called on their own, while the
range of one group of layers changes at a time. Memory: three copies of a run's inputs and outputs for all samples, and the
blocks' other arguments (positions, masks). Time: each block costs `4 groups * (grid - 1) * sweeps` passes through its run,
about 100 forward passes of the decoder in total with the defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.models import VLM, Group
from vlmcompress.models.devices import accelerator, resident
from vlmcompress.numerics import fake_quantize, find_params
from vlmcompress.quantization.calibration.block_inputs import Batch, capture_block_inputs
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.calibration.entropy import PAIRED, conditional_entropy
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.schemes import qvlm
from vlmcompress.utils.progress import Progress, silent

Key = tuple[int, str]


@torch.no_grad()
def search_ranges(
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    batches: Sequence[dict[str, Tensor]],
    method: QuantMethod,
    progress: Progress = silent,
) -> QuantMethod:
    """Search a range for each group of layers and return the method with these ranges; the model is unchanged at the end.

    Args:
        blocks: the groups to quantize of each decoder block.
        batches: from `encode`.
        method: a method of scheme `qvlm`; groups with another scheme keep their float weights in the search.
    """
    modules: list[Any] = [vlm.model.get_submodule(name) for name in models.decoder_layers(vlm.model, vlm.spec)]
    base_options, samples = _options(method), capture_block_inputs(vlm, batches, progress)
    runs = qvlm.partition(entropies(vlm, batches), base_options.depth)
    floats = [batch.hidden for batch in samples]
    quantized = list(floats)
    chosen: dict[Key, float] = {}
    device = accelerator() or vlm.model.device
    # Two streams: `floats` go through the original blocks, `quantized` through the quantized ones.
    for run in runs:
        outputs = floats
        with contextlib.ExitStack() as stack:
            for block in run:
                stack.enter_context(resident(modules[block], device))
                outputs = call(modules, block, outputs, samples)
            groups = [
                [group for group in blocks[block] if isinstance(method.of(group).quantizer, qvlm.Qvlm)] for block in run
            ]
            weights = stack.enter_context(_Weights(vlm.model, [group for part in groups for group in part], method))
            chosen |= _descend(modules, run, groups, samples, quantized, outputs, weights, base_options)
            for block in run:
                quantized = call(modules, block, quantized, samples)
        floats = outputs
        progress("searching ranges", run[-1] + 1, len(modules))
    others = dict(method.others)
    for key, percentile in chosen.items():
        options = {**vars(_options(method.others.get(key, method))), "percentile": percentile}
        others[key] = QuantMethod(qvlm.SCHEME, qvlm.Ranged(**options))
    return replace(method, others=others)


def _options(method: QuantMethod) -> qvlm.Options:
    """The options of a method of scheme `qvlm`."""
    assert isinstance(method.options, qvlm.Options)
    return method.options


def entropies(vlm: VLM, batches: Sequence[dict[str, Tensor]]) -> list[float]:
    """The entropy of each block's input given that of the block before, in the float model."""
    spec, blocks = CaptureSpec(frozenset(), sampled_rows=PAIRED), models.decoder_blocks(vlm.model, vlm.spec)
    captures = [captured for _, captured in capture_blocks(vlm, blocks, batches, spec)]
    rows = [captured.rows for captured in captures if captured is not None and captured.rows is not None]
    return [conditional_entropy(a, b) for a, b in zip([None, *rows[:-1]], rows, strict=True)]


def call(modules: Sequence[Any], block: int, xs: Sequence[Tensor], samples: Sequence[Batch]) -> list[Tensor]:
    """Call a block on its own device for each batch; return the next block's inputs, on the devices of `xs`."""
    device = next(modules[block].parameters()).device
    return [
        batch.run_block(modules[block], block, device, x).to(x.device) for x, batch in zip(xs, samples, strict=True)
    ]


class _Weights:
    """The weights of a run's linear layers, quantized in the ranges chosen so far; restored at the end."""

    def __init__(self, model: nn.Module, groups: Sequence[Group], method: QuantMethod):
        self.formats = {(g.layer, g.name): qvlm.SCHEME.scheme(_options(method.of(g))).weights for g in groups}
        self.weights = {
            (group.layer, group.name): [model.get_parameter(f"{name}.weight") for name in group.linears]
            for group in groups
        }
        self.float = {key: [weight.data for weight in linears] for key, linears in self.weights.items()}

    def __enter__(self) -> _Weights:
        for key in self.weights:
            self.set(key, 1.0)
        return self

    def __exit__(self, *_: object) -> None:
        for key, linears in self.weights.items():
            for weight, original in zip(linears, self.float[key], strict=True):
                weight.data = original

    def set(self, key: Key, percentile: float) -> None:
        """Quantize a group with ranges that cover `percentile`."""
        fmt = self.formats[key]
        for weight, original in zip(self.weights[key], self.float[key], strict=True):
            ratio = qvlm.cover(original, fmt, percentile)
            params = find_params(original, fmt, scale_dtype=original.dtype, ratio=ratio)
            weight.data = fake_quantize(original, *params, fmt).to(original.dtype)


def _descend(
    modules: Sequence[Any],
    run: Sequence[int],
    groups: Sequence[Sequence[Group]],
    samples: Sequence[Batch],
    inputs: list[Tensor],
    targets: Sequence[Tensor],
    weights: _Weights,
    options: qvlm.Options,
) -> dict[Key, float]:
    """Change one group's range at a time while the run's output gets closer to `targets`; leaves the best ranges set and
    returns their percentiles."""

    def error(block: int, xs: list[Tensor]) -> float:
        """Error of the run's output, from the inputs `xs` of one of its blocks on."""
        for later in range(block, run[-1] + 1):
            xs = call(modules, later, xs, samples)
        parts = zip(xs, targets, samples, strict=True)
        # || F_run(x; quantized) - F_run(x; float) ||^2 over tokens that are not padding, summed in float64.
        return sum(
            float((x - y)[s.modality.to(x.device) > 0].float().square().sum(dtype=torch.float64)) for x, y, s in parts
        )

    # Coordinate descent: the error never rises, and a turn without a change means a local minimum.
    chosen = dict.fromkeys(weights.weights, 1.0)
    least = error(run[0], inputs)
    for _ in range(options.sweeps):
        before, xs = dict(chosen), inputs
        for block, members in zip(run, groups, strict=True):
            for key in ((group.layer, group.name) for group in members):
                for percentile in qvlm.percentiles(options):
                    if percentile != chosen[key]:
                        weights.set(key, percentile)
                        # Blocks before this one do not change: only it and the later ones are run again.
                        if (loss := error(block, xs)) < least:
                            least, chosen[key] = loss, percentile
                weights.set(key, chosen[key])
            xs = call(modules, block, xs, samples)
        if chosen == before:
            break
    return chosen

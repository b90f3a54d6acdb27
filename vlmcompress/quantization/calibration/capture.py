"""Capture the inputs of a decoder's linear layers block by block, over calibration samples.

`capture_blocks` yields a block once all samples have run through it. `CaptureSpec.prefix` says what is quantized by then:

* "float": nothing. A block runs once, and its output is the next one's input.
* "quantized": the caller modifies each yielded block, which then runs again, so that the next block sees the new output. The
  first run ends at the last layer whose input is captured.

Memory holds one block's statistics and, on an accelerator, one block's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.models import VLM, Group
from vlmcompress.models.devices import accelerator, resident, trim, widened
from vlmcompress.numerics.statistics.balance import MODALITIES
from vlmcompress.numerics.statistics.inputs import ROWS, SAMPLE
from vlmcompress.numerics.statistics.tokens import splits, thinned
from vlmcompress.quantization.calibration.block_inputs import Batch, Refused, StopForward, capture_block_inputs
from vlmcompress.quantization.calibration.input_recorder import (
    BlockCapture,
    CaptureSpec,
    InputRecorder,
    TokenIndex,
)
from vlmcompress.quantization.calibration.routed import LayerDraw, mixtures, routed_to_all
from vlmcompress.utils.progress import Progress, phase, silent


@torch.no_grad()
def capture_blocks(
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    samples: Sequence[dict[str, Tensor]],
    spec: CaptureSpec,
    *,
    finished: Callable[[int], bool] = lambda _layer: False,
    passed: Callable[[int], object] = lambda _layer: None,
    release: bool = False,
    progress: Progress = silent,
) -> Iterator[tuple[int, BlockCapture | None]]:
    """Yield the number of each block that has groups, with its capture.

    Args:
        blocks: the groups to capture of each decoder block, optionally followed by the output head's.
        samples: from `encode`, one sample each.
        finished: whether a block needs no capture; it is then yielded with None.
        passed: called with the number of each block that has groups when its output has been passed on, before it leaves the
            accelerator.
        release: once the blocks' inputs are captured, remove everything except `modality` from `samples`, as images take
            gigabytes.
        progress: called with (label, done, total).

    Raises:
        UserError: NaN or Inf among the inputs of a layer.
    """
    run = _Capture(vlm, samples, spec, progress)
    for sample in samples if release else ():
        for name in sample.keys() - {"modality"}:
            del sample[name]
    # Blocks after the last pending one need not run.
    pending = [layer for layer, groups in enumerate(blocks) if groups and not finished(layer)]
    last = max(pending, default=-1)
    run.total = (len(run.batches) + len(run.held_out)) * len(pending)
    for layer, groups in enumerate(blocks):
        block = run.block(layer)
        advanced = False
        with resident(block, run.device), routed_to_all(block) if spec.all_experts else nullcontext():
            if layer in pending:
                advanced = layer < last and spec.prefix == "float"
                with phase("observing"):
                    captured = run.capture(layer, block, groups, advance=advanced)
                yield layer, captured
            elif groups:
                yield layer, None
            # "quantized": the block now has quantized weights, and the next block sees its output.
            if layer < last and not advanced:
                run.advance(layer, block, [*run.batches, *run.held_out])
            if groups:
                passed(layer)


class _Capture:
    """The samples on their way through the blocks."""

    def __init__(self, vlm: VLM, every: Sequence[dict[str, Tensor]], spec: CaptureSpec, progress: Progress):
        self.vlm, self.spec, self.progress = vlm, spec, progress
        self.paths = [*models.decoder_layers(vlm.model, vlm.spec), ""]  # the output head is in no block
        samples, held_out = every[: len(every) - spec.held_out], every[len(every) - spec.held_out :]
        with phase("capturing block inputs"):
            self.batches: list[Batch] = capture_block_inputs(vlm, samples, progress)
            # Batches of their own, so that they change no sum of the others.
            try:
                self.held_out = capture_block_inputs(vlm, held_out) if held_out else []
            except Refused as error:
                raise Refused({len(samples) + number: why for number, why in error.reasons.items()}) from error
        self.device = accelerator() or vlm.model.device
        self.tokens = self._index(*([sample["modality"] for sample in part] for part in (samples, held_out)))
        self.done = self.total = 0

    def _index(self, masks: list[Tensor], held_masks: list[Tensor]) -> TokenIndex:
        """Find the tokens of each modality by the samples' `masks [1, tokens]`, and those of held-out samples."""
        spec, rows = self.spec, [batch.samples for batch in self.batches]
        masks = thinned(masks, spec.tokens, spec.seed)
        counts, held_counts = (
            {name: sum(int((mask == code).sum()) for mask in part) for code, name in enumerate(MODALITIES, 1)}
            for part in (masks, held_masks)
        )
        held_rows = [batch.samples for batch in self.held_out]
        drawn = (
            splits([mask.clamp(max=1) for mask in masks], rows, spec.sampled_rows, spec.seed)
            if spec.sampled_rows
            else []
        )
        width = next((mixture.width for mixture in mixtures(self.vlm.model)), 0)
        return TokenIndex(
            [split.to(self.device) for split in splits(masks, rows, SAMPLE)],
            [split.to(self.device) for split in drawn],
            counts,
            LayerDraw(counts, masks, rows, width, spec.seed) if width else None,
            [split.to(self.device) for split in splits(held_masks, held_rows, ROWS, spec.seed)],
            {name: min(count, ROWS) for name, count in held_counts.items() if count},
        )

    def block(self, layer: int) -> nn.Module:
        """A decoder block; after the last one the norm and the output head."""
        if path := self.paths[layer]:
            return self.vlm.model.get_submodule(path)
        return models.NormAndHead(self.vlm.model, self.vlm.spec)

    def advance(self, layer: int, block: nn.Module, batches: Sequence[Batch]) -> None:
        """Run batches through a block, to the input of the next one."""
        with phase("passing on"):
            forward = widened(block)
            for batch in batches:
                batch.set_hidden(batch.run_block(forward, layer, self.device))

    def capture(
        self,
        layer: int,
        block: nn.Module,
        groups: Sequence[Group],
        *,
        advance: bool,
    ) -> BlockCapture:
        """Run all samples through a block, or up to the last captured input.

        Args:
            advance: whether samples advance to the next block.
        """
        path = self.paths[layer]
        stops = not path or (not advance and not self.spec.kv_cache)
        forward = widened(block) if path else block  # the head is not run
        recorder = InputRecorder(self.vlm.model, path, groups, self.spec, self.tokens, self.device, stops=stops)
        with recorder:
            for number, batch in enumerate(self.batches):
                recorder.begin(number, batch)
                self._run_batch(batch, forward, layer, advance)
            recorder.fill()
            for number, batch in enumerate(self.held_out):
                recorder.begin_held_out(number)
                self._run_batch(batch, forward, layer, advance)
        del forward  # float32 copies of the block's weights
        captured = recorder.finish(lambda: self._faulty_sample(layer, block))
        trim()
        return captured

    def _run_batch(self, batch: Batch, forward: Callable[..., Any], layer: int, advance: bool) -> None:
        """Run a block on a batch until the recorder has its inputs; `advance`: to its end, for the next block's inputs."""
        with suppress(StopForward):
            hidden = batch.run_block(forward, layer, self.device)
            if advance:
                batch.set_hidden(hidden)
        self.done += 1
        self.progress("calibrating", self.done, self.total)

    def _faulty_sample(self, layer: int, block: nn.Module) -> int | None:
        """The first sample whose hidden states before or after a block hold NaN or Inf."""
        faulty = []
        for batch in self.batches:
            output = batch.run_block(block, layer, self.device)
            bad = ~(batch.hidden.to(output.device).isfinite().all(-1) & output.isfinite().all(-1)).cpu()
            rows = (bad & (batch.modality > 0)).any(1).tolist()
            faulty += [sample for sample, wrong in zip(batch.samples, rows, strict=True) if wrong]
        return min(faulty, default=None)

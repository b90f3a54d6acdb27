"""Run a decoder block by block over calibration samples, and tell what each block was seen to get.

`observe` yields a block when it has seen all samples. Whoever takes it may change the block's weights before asking for the
next one. With the *float prefix* nothing is changed and a block runs once. With the *quantized prefix* it is changed, and runs
again to pass on what it puts out now, which is the next one's input; its first run ends where the last layer is reached whose
input is wanted. Memory holds one block's statistics, and on an accelerator one block's weights.

Where the cross-Gram matrix is wanted (`statistics.inputs`), the samples go two ways side by side: through the blocks
as they were, a copy of one at a time, and through the changed ones. A batch goes the first way through a block just
before it goes the second, so that the inputs of both are in memory for one batch only; hidden states between two
blocks are, twice. With `stepwise` a block is seen group by group, each behind those that its taker has changed
already, and runs as often.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.calibration.block_inputs import Batch, record
from vlmcompress.calibration.devices import accelerator, resident, trim
from vlmcompress.calibration.float_products import widened
from vlmcompress.calibration.kv_cache import watch
from vlmcompress.calibration.routed import LayerDraw, Routed, mixtures, routed_to_all
from vlmcompress.common import distributed
from vlmcompress.common.progress import Progress, phase, silent
from vlmcompress.models import VLM, Group
from vlmcompress.statistics.balance import MODALITIES
from vlmcompress.statistics.collect import Collector
from vlmcompress.statistics.inputs import CROSS, SAMPLE, GroupStats
from vlmcompress.statistics.kv_range import KVRange
from vlmcompress.statistics.tokens import Split, splits

TokenWeights = Sequence[dict[tuple[int, str], Tensor]]
"""For each sample, (block, group) -> factors `[tokens]` of the rows of the group's input."""


@dataclass(frozen=True)
class Wanted:
    """What is to be seen of each block.

    Attributes:
        needs: names of the statistics of each group of linear layers.
        kv_cache: ranges of keys and values.
        tokens: how many rows of the first group's input are drawn; 0: none.
        seed: of that draw.
        weights: factors of the rows of a group's input, where single tokens are weighed.
        all_experts: every expert of a mixture is given all tokens, not those alone that the router sends it.
        stepwise: each group of a block is seen by itself, behind those before it as they are changed by then.
    """

    needs: frozenset[str]
    kv_cache: bool = False
    tokens: int = 0
    seed: int = 0
    weights: TokenWeights = ()
    all_experts: bool = False
    stepwise: bool = False


@dataclass
class Seen:
    """What a block was seen to get.

    Attributes:
        stats: by group of linear layers.
        kv_ranges: attention module -> ranges of keys and values; empty where they are not wanted.
        tokens: drawn rows of the first group's input, `[at most wanted, in]` float32; None where they are not wanted.
        batches: this worker's samples, at the block's input where it runs twice.
    """

    stats: dict[str, GroupStats] = field(default_factory=dict)
    kv_ranges: dict[str, Tensor] = field(default_factory=dict)
    tokens: Tensor | None = None
    batches: Sequence[Batch] = ()


@torch.no_grad()
def observe(
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    samples: Sequence[dict[str, Tensor]],
    wanted: Wanted,
    *,
    twice: bool,
    known: Callable[[int], bool] = lambda _layer: False,
    progress: Progress = silent,
) -> Iterator[tuple[int, Seen | None]]:
    """Yield each block that has groups, with what it was seen to get; stepwise as often as it has groups.

    Args:
        blocks: the groups to observe of each decoder block.
        samples: from `encode`, one sample each.
        twice: the taker changes a block, which passes on what it puts out then.
        known: whether a block need not be observed; it is yielded with None in its turn.
        progress: called with (label, done, total).

    Raises:
        UserError: NaN or Inf among the inputs of a layer.
    """
    run = _Run(vlm, samples, wanted, progress)
    last = max((layer for layer, groups in enumerate(blocks) if groups and not known(layer)), default=-1)
    parts = [[[one] for one in groups] if wanted.stepwise else [groups] for groups in blocks]
    run.total = len(run.batches) * sum(
        len(parts[layer]) for layer, groups in enumerate(blocks) if groups and not known(layer)
    )
    for layer, groups in enumerate(blocks):
        block = vlm.model.get_submodule(run.paths[layer])
        with resident(block, run.device), routed_to_all(block) if wanted.all_experts else nullcontext():
            if groups and known(layer):
                run.pass_on(layer, block, run.twins, last)
                yield layer, None
            elif groups:
                original = copy.deepcopy(block) if run.twins else None
                for number, part in enumerate(parts[layer], start=1):
                    ends = layer < last and number == len(parts[layer])
                    with phase("observing"):
                        seen = run.watch(layer, block, part, original, passes_on=not twice and ends, leads_on=ends)
                    yield layer, seen
                del original
                if not twice:
                    continue
            else:
                run.pass_on(layer, block, run.twins, last)
            run.pass_on(layer, block, run.batches, last)


class _Run:
    """The samples on their way through the blocks."""

    def __init__(self, vlm: VLM, samples: Sequence[dict[str, Tensor]], wanted: Wanted, progress: Progress):
        self.vlm, self.wanted, self.progress = vlm, wanted, progress
        self.paths = models.decoder_layers(vlm.model, vlm.spec)
        with phase("capturing block inputs"):
            self.batches: list[Batch] = record(vlm, samples, progress)
        # The same samples on their way through the blocks as they were; empty where that is not asked for.
        self.twins = [batch.twin() for batch in self.batches] if CROSS in wanted.needs else []
        self.device = accelerator() or vlm.model.device
        masks = [one["modality"] for one in samples]
        rows = [batch.samples for batch in self.batches]
        self.splits = [one.to(self.device) for one in splits(masks, rows, SAMPLE)]
        kept = [mask.clamp(max=1) for mask in masks] if wanted.tokens else []
        self.drawn = [one.to(self.device) for one in splits(kept, rows if kept else [], wanted.tokens, wanted.seed)]
        # Modality -> its tokens in all samples, those of other workers included.
        self.counts = {
            name: sum(int((mask == code).sum()) for mask in masks) for code, name in enumerate(MODALITIES, 1)
        }
        width = next((one.width for one in mixtures(vlm.model)), 0)
        self.layer_draw = LayerDraw(self.counts, masks, rows, width, wanted.seed) if width else None
        self.done = self.total = 0

    def pass_on(self, layer: int, block: nn.Module, batches: Sequence[Batch], last: int) -> None:
        """Take batches through a block, unless nothing behind it is wanted."""
        if layer >= last or not batches:
            return
        with phase("passing on"):
            run = widened(block)
            for batch in batches:
                batch.take(batch.through(run, layer, self.device))

    def watch(
        self,
        layer: int,
        block: nn.Module,
        groups: Sequence[Group],
        original: nn.Module | None,
        *,
        passes_on: bool,
        leads_on: bool,
    ) -> Seen:
        """Take all samples through a block, or as far as there is something to see, and tell what was seen.

        Args:
            original: the block as it was, through which their twins are taken; None: there are none.
            passes_on: samples go on to the next block; `leads_on`: their twins do.
        """
        run = widened(block)
        eye = _Eye(self, layer, groups, stops=not passes_on and not self.wanted.kv_cache)
        other = _Other(self, layer, groups, original, leads_on) if original is not None else None
        with eye:
            for number, batch in enumerate(self.batches):
                eye.begin(number)
                if other:
                    eye.originals = other.inputs(self.twins[number])
                with suppress(_Enough):
                    if passes_on:
                        batch.take(batch.through(run, layer, self.device))
                    else:
                        batch.through(run, layer, self.device)
                self.done += 1
                self.progress("calibrating", self.done, self.total)
            eye.fill()
        if other:
            other.close()
        del run, other  # float32 copies of the block's weights
        seen = eye.seen(lambda: self._culprit(layer, block))
        trim()
        return seen

    def _culprit(self, layer: int, block: nn.Module) -> int | None:
        """The first sample whose hidden states before or behind a block hold NaN or Inf."""
        found = []
        for batch in self.batches:
            behind = batch.through(block, layer, self.device)
            bad = ~(batch.hidden.to(behind.device).isfinite().all(-1) & behind.isfinite().all(-1)).cpu()
            rows = (bad & (batch.modality > 0)).any(1).tolist()
            found += [sample for sample, wrong in zip(batch.samples, rows, strict=True) if wrong]
        return min(found, default=None)


class _Enough(Exception):
    """There is nothing more to see in this block."""


class _Other:
    """A block as it was, which tells what its layers get; `leads_on`: and passes on what it puts out."""

    def __init__(self, run: _Run, layer: int, groups: Sequence[Group], block: nn.Module, leads_on: bool):
        self.layer, self.device, self.leads_on = layer, run.device, leads_on
        self.found: dict[int, Tensor] = {}
        self.wanted = len(groups)
        start = f"{run.paths[layer]}."
        self.hooks = [
            block.get_submodule(group.linears[0].removeprefix(start)).register_forward_pre_hook(self._keeps(index))
            for index, group in enumerate(groups)
        ]
        self.run = widened(block)

    def inputs(self, batch: Batch) -> dict[int, Tensor]:
        """What the groups' layers get of a batch, by the group's index."""
        self.found = {}
        with suppress(_Enough):
            hidden = batch.through(self.run, self.layer, self.device)
            if self.leads_on:
                batch.take(hidden)
        return self.found

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self.hooks:
            hook.remove()

    def _keeps(self, index: int) -> Callable:
        def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.found[index] = args[0]
            if not self.leads_on and len(self.found) == self.wanted:
                raise _Enough

        return keep


class _Eye:
    """Hooks on a block that see what its layers get, while it is a context."""

    def __init__(self, run: _Run, layer: int, groups: Sequence[Group], *, stops: bool):
        self.run, self.layer, self.groups, self.wanted = run, layer, groups, run.wanted
        self.linears: list[Any] = [run.vlm.model.get_submodule(group.linears[0]) for group in groups]
        self.collectors = [Collector(linear.in_features, self.wanted.needs) for linear in self.linears]
        self.ranges: dict[str, KVRange] = {}
        self.tokens = torch.zeros(self.wanted.tokens, self.linears[0].in_features, device=run.device)
        self.stops = stops
        self.number = 0
        self.passed: set[int] = set()  # groups whose input was seen of the present batch
        self.originals: dict[int, Tensor] = {}  # what the groups get of it in the block as it was
        self.hooks = ExitStack()
        self.routed = Routed.of(run.vlm.model, groups, run.layer_draw, run.device) if run.layer_draw else None

    def __enter__(self) -> _Eye:
        for index, linear in enumerate(self.linears):
            self.hooks.callback(linear.register_forward_pre_hook(self._sees(index)).remove)
        if self.routed:
            self.hooks.callback(self.routed.watching().remove)
        path = self.run.paths[self.layer]
        module = getattr(self.run.vlm.model.get_submodule(path), "self_attn", None)
        if self.wanted.kv_cache and module is not None:
            attention = f"{path}.self_attn"
            self.ranges[attention] = KVRange()
            self.hooks.callback(watch(module, self.ranges[attention], lambda: self._batch.modality).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    @property
    def _batch(self) -> Batch:
        return self.run.batches[self.number]

    def begin(self, number: int) -> None:
        """Tell which batch comes next."""
        self.number, self.passed = number, set()
        if self.routed:
            self.routed.begin(number, self._batch.modality)

    def fill(self) -> None:
        """After all batches, show experts that were given too few tokens others."""
        self.stops = False
        if self.routed:
            self.routed.fill(self.collectors)

    def seen(self, culprit: Callable[[], int | None]) -> Seen:
        """What was seen of all batches."""
        problem, device, counts = None, self.run.device, self.run.counts
        for group, collector in zip(self.groups, self.collectors, strict=True):
            try:
                collector.settle()
            except ValueError as error:
                if problem is None:
                    sample = culprit()
                    where = "" if sample is None else f", calibration sample {sample}"
                    problem = f"{group.linears[0]}{where}: {error}"
        distributed.raise_any(problem)
        found = Seen(batches=self.run.batches)
        for index, (group, collector) in enumerate(zip(self.groups, self.collectors, strict=True)):
            own = self.routed.counts.get(index, counts) if self.routed else counts
            stats = found.stats[group.name] = collector.pooled(own, device, distributed.all_sum, distributed.all_max)
            if self.routed and index in self.routed.owners:
                stats.routed, stats.borrowed = True, self.routed.borrowed.get(index, 0)
        for name, one in self.ranges.items():
            found.kv_ranges[name] = one.pooled(distributed.all_sum, distributed.all_max).cpu()
        if self.wanted.tokens:
            found.tokens = distributed.all_sum(self.tokens)[: sum(counts.values())].cpu()
        return found

    def _sees(self, index: int) -> Callable:
        def see(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            if self.routed and index in self.routed.owners:
                split: Split | None = self.routed.split(index)
            else:
                split = self._split(x)
            original = self.originals.pop(index, None)
            if original is not None:
                original = self._weighed(index, original)
            self.collectors[index].add(self._weighed(index, x), split, original)
            if index == 0 and self.wanted.tokens:
                self._draw(x)
            self.passed.add(index)
            if self.stops and len(self.passed) == len(self.groups):
                raise _Enough

        return see

    def _split(self, x: Tensor) -> Split | None:
        """Modalities of the rows of `x [..., in]`; None where these are not the batch's tokens."""
        split = self.run.splits[self.number]
        return split if x.numel() // x.shape[-1] == split.tokens else None

    def _weighed(self, index: int, x: Tensor) -> Tensor:
        if not self.wanted.weights:
            return x
        key = (self.layer, self.groups[index].name)
        own = [self.wanted.weights[sample].get(key) for sample in self._batch.samples]
        if all(one is None for one in own):
            return x
        factors = x.new_ones(self._batch.modality.shape, dtype=torch.float32)
        for row, one in zip(factors, own, strict=True):
            if one is not None:
                row[len(row) - len(one) :] = one
        return x * factors.view(*x.shape[:-1], 1)

    def _draw(self, x: Tensor) -> None:
        drawn, rows = self.run.drawn[self.number].drawn, x.reshape(-1, x.shape[-1])
        if "text" in drawn:
            places, chosen = drawn["text"]
            self.tokens.index_copy_(0, places, rows.index_select(0, chosen).float())

"""Drive the calibration with llm-compressor's sequential pipeline.

llm-compressor cuts the model into one subgraph per decoder block, runs the calibration set through each twice (once
to observe, once to pass on what the quantized block puts out) and keeps the activations between blocks.
`BlockObserver` is our part of it: it accumulates `GroupStats` per modality while a block is observed and hands them on
when the block has seen all samples. `BlockModifier` solves the block with them (`blocks.solve`), puts the quantized
weights into the model, and stores the result so that an interrupted run can go on: the *quantized prefix*, in which a
block is observed behind blocks that are quantized already. `BlockCollector` only stores the statistics and leaves the
model as it is: the *float prefix*, for which one run of each block is enough. The modality of each token travels in the
field that llm-compressor calls `loss_mask`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.core import active_session
from llmcompressor.modifiers import Modifier
from pydantic import ConfigDict, PrivateAttr
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vlmcompress import models
from vlmcompress.blocks.solve import Method, apply, solve_block
from vlmcompress.calibration.kv_cache import watch
from vlmcompress.errors import UserError
from vlmcompress.models import VLM, Group
from vlmcompress.statistics.balance import Sensitivity
from vlmcompress.statistics.inputs import NEEDS, GroupStats
from vlmcompress.statistics.kv_range import KVRange


class BlockObserver(Modifier):
    """Modifier that collects statistics of the inputs of one block after another.

    Attributes:
        blocks: the groups to observe of each decoder block.
        attention: attention modules whose keys and values are to be scaled to FP8, by block; empty: none.
        store: keeps the results of each block; blocks found there are not observed again.
        batches: calibration samples.
        progress: called with (label, done, total).
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    requires_calibration_data: bool = True

    blocks: list[list[Group]]
    attention: dict[int, str]
    store: Any
    batches: int
    progress: Any

    _stats: dict[int, dict[str, GroupStats]] = PrivateAttr(default_factory=dict)
    _observing: dict[int, set[Any]] = PrivateAttr(default_factory=dict)  # hooks, which keep the statistics alive
    _ranges: dict[int, KVRange] = PrivateAttr(default_factory=dict)
    _linears: dict[str, Any] = PrivateAttr(default_factory=dict)
    _seen: int = PrivateAttr(default=0)

    def on_initialize(self, state, **kwargs) -> bool:
        names = {name for block in self.blocks for group in block for name in group.linears}
        names |= {group.smooth for block in self.blocks for group in block if group.smooth}
        self._linears = {name: state.model.get_submodule(name) for name in names}
        return True

    def on_calibration_start(self, state, event, **kwargs) -> None:
        for layer, groups in enumerate(self.blocks):
            if not groups:
                continue
            first = self._linears[groups[0].linears[0]]
            self.register_hook(first, self._tick, "forward_pre")  # type: ignore[arg-type]
            if self.store.has(layer):
                continue
            self._stats[layer], self._observing[layer] = {}, set()
            for group in groups:
                linear = self._linears[group.linears[0]]
                stats = GroupStats(linear.in_features, self.wanted())
                self._stats[layer][group.name] = stats
                observe = _observer(stats, group.linears[0], partial(self.token_weight, (layer, group.name)))
                self._observing[layer].add(self.register_hook(linear, observe, "forward_pre"))
            if layer in self.attention:
                self._ranges[layer] = watch(state.model, state.model.get_submodule(self.attention[layer]), self)

    def on_sequential_epoch_end(self, state, event, modules: Sequence[nn.Module] = (), **kwargs) -> None:
        present = set(modules)
        for layer, groups in enumerate(self.blocks):
            if groups and all(self._linears[group.linears[0]] in present for group in groups):
                self._finish(layer, groups)

    def on_calibration_end(self, state, event, **kwargs) -> None:
        self.remove_hooks()

    def on_finalize(self, state, **kwargs) -> bool:
        return True

    def wanted(self) -> frozenset[str]:
        """Names of the statistics to keep."""
        raise NotImplementedError

    def observed(
        self, layer: int, groups: list[Group], stats: dict[str, GroupStats], kv_ranges: dict[str, Tensor]
    ) -> None:
        """Called when a block has seen all samples; must store its results."""
        raise NotImplementedError

    def token_weight(self, group: tuple[int, str], sample: int) -> Tensor | None:
        """Factors `[tokens]` for the rows of a group's input in one sample; None: all are 1."""
        return None

    def known(self, layer: int) -> None:
        """Called when a block has run whose results the store has already."""

    def _finish(self, layer: int, groups: list[Group]) -> None:
        if self.store.has(layer):
            self.known(layer)
            return
        if layer not in self._stats:
            return
        stats = self._stats.pop(layer)
        self.remove_hooks(self._observing.pop(layer))
        ranges = self._ranges.pop(layer, None)
        self.observed(layer, groups, stats, {self.attention[layer]: ranges.ranges} if ranges else {})

    def _tick(self, _module: nn.Module, _args: Any) -> Any:
        self._seen += 1
        blocks = sum(bool(groups) for groups in self.blocks)
        self.progress("calibrating", min(self._seen, blocks * self.batches), blocks * self.batches)


class BlockModifier(BlockObserver):
    """Modifier that quantizes one block after another from statistics of its inputs.

    Attributes:
        method: scheme and options.
        sensitivity: (block, group) -> sensitivity, for balances by gradients.
        store: a `blocks.store.BlockStore`.
        token_weights: for each sample, (block, group) -> factors `[tokens]` for the rows of the group's input.
        scales: (block, group) -> smoothing scale `[in]`, where the method searches by block.
    """

    method: Method
    sensitivity: dict[tuple[int, str], Sensitivity]
    token_weights: list[dict[tuple[int, str], Tensor]]
    scales: dict[tuple[int, str], Tensor]

    def wanted(self) -> frozenset[str]:
        activations = self.method.scheme and self.method.scheme.activations
        return self.method.needs & NEEDS | {"gram"} | ({"absmax"} if activations else set())

    def observed(
        self, layer: int, groups: list[Group], stats: dict[str, GroupStats], kv_ranges: dict[str, Tensor]
    ) -> None:
        for group, one in stats.items():
            one.sensitivity = self.sensitivity.get((layer, group))
        weights = {name: self._linears[name].weight.detach() for group in groups for name in group.linears}
        first = next(iter(weights.values()))
        scales = {name: scale.to(first.device) for (block, name), scale in self.scales.items() if block == layer}
        norms = {
            g.smooth: self._linears[g.smooth].weight.detach() for g in groups if g.smooth_kind == "norm" and g.smooth
        }
        result = solve_block(groups, weights, stats, self.method, first.dtype, scales, norms)
        result.kv_ranges |= kv_ranges
        self.store.save(layer, result)
        apply(result, self._linears)

    def token_weight(self, group: tuple[int, str], sample: int) -> Tensor | None:
        return self.token_weights[sample].get(group) if self.token_weights else None

    def known(self, layer: int) -> None:
        apply(self.store.load(layer), self._linears)


class BlockCollector(BlockObserver):
    """Modifier that stores the statistics of one block after another.

    Attributes:
        needs: names of the statistics to collect.
        store: a `statistics_folder.Collected`.
    """

    needs: frozenset[str]

    def wanted(self) -> frozenset[str]:
        return self.needs

    def observed(
        self, layer: int, groups: list[Group], stats: dict[str, GroupStats], kv_ranges: dict[str, Tensor]
    ) -> None:
        self.store.save(layer, stats, kv_ranges)


def _observer(stats: GroupStats, name: str, weigh: Callable[[int], Tensor | None]) -> Callable:
    def observe(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        state = active_session().state
        assert state.loss_masks is not None
        mask = state.loss_masks[state.current_batch_idx]
        x, weight = args[0], weigh(state.current_batch_idx)
        if weight is not None:
            x = x * weight.to(x.device).view(*x.shape[:-1], 1)
        try:
            stats.update(x, mask if x.shape[:-1] == mask.shape else None)
        except ValueError as error:
            raise UserError(f"{name}, calibration sample {state.current_batch_idx}: {error}") from error

    return observe


def alike(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Give every batch the same keys, as the pipeline traces the model once, with the first batch.

    A sample without an image gets the shortest sample with one appended, as tokens to ignore: attention is causal, so the
    text before them is computed as if they weren't there, and statistics leave them out.
    """
    donors = [batch for batch in batches if "pixel_values" in batch]
    if len(donors) in (0, len(batches)):
        return batches
    donor = min(donors, key=lambda batch: batch["input_ids"].shape[1])
    length = donor["input_ids"].shape[1]

    def extend(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        tail = {**donor, "modality": torch.zeros_like(donor["modality"])}
        own = {key: torch.cat([value, tail[key]], 1) for key, value in batch.items() if tail[key].shape == (1, length)}
        return tail | own

    return [batch if "pixel_values" in batch else extend(batch) for batch in batches]


def loader(batches: list[dict[str, Tensor]]) -> DataLoader:
    """Load samples from `encode` as llm-compressor takes them: all with the same keys, modalities as `loss_mask`."""
    items = [{**{k: v for k, v in b.items() if k != "modality"}, "loss_mask": b["modality"]} for b in alike(batches)]
    return DataLoader(items, batch_size=1, collate_fn=lambda rows: rows[0])  # type: ignore[arg-type]


def attention_modules(vlm: VLM) -> dict[int, str]:
    """The attention module of each decoder block that has one."""
    names = {name for name, _ in vlm.model.named_modules()}
    found = {i: f"{name}.self_attn" for i, name in enumerate(models.decoder_layers(vlm.model, vlm.spec))}
    return {layer: name for layer, name in found.items() if name in names}


def run_oneshot(
    vlm: VLM, batches: list[dict[str, Tensor]], recipe: list[Modifier], layer_class: str, *, twice: bool = True
) -> None:
    """Run the calibration set through llm-compressor's sequential pipeline.

    Args:
        batches: from `encode`: the processor's tensors plus `modality [1, tokens]`; one sample each.
        recipe: the modifiers to run.
        layer_class: class name of a decoder block.
        twice: run each block again after it was observed, as the modifiers change its output.
    """
    oneshot(
        model=vlm.model,
        processor=vlm.processor,
        recipe=recipe,
        dataset=loader(batches),
        num_calibration_samples=len(batches),
        sequential_targets=[layer_class],
        use_loss_mask=True,
        pipeline="sequential",
        propagate_error=twice,
    )

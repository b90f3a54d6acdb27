"""Hooks that record the inputs of a decoder block's linear layers, and types that describe what to record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vlmcompress.models import Group
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.numerics.statistics.kv_range import KVRange
from vlmcompress.numerics.statistics.tokens import Split
from vlmcompress.quantization.calibration.block_inputs import Batch, StopForward
from vlmcompress.quantization.calibration.routed import LayerDraw, Routed
from vlmcompress.utils import distributed


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture of each block.

    Attributes:
        statistics: names of the statistics of each group of linear layers (`statistics.inputs`).
        prefix: what is quantized when a group's inputs are captured: nothing ("float") or the blocks before ("quantized").
        kv_cache: also capture ranges of keys and values.
        sampled_rows: number of rows to draw from the first group's input; 0: none.
        tokens: number of tokens that statistics are taken of, by `statistics.tokens.thinned`; 0: all.
        seed: seed of these draws.
        all_experts: give every expert of a mixture all tokens, not only those routed to it.
        held_out: how many of the samples, the last ones, only errors are measured on (`GroupStats.measured`).
    """

    statistics: frozenset[str]
    prefix: Literal["float", "quantized"] = "float"
    kv_cache: bool = False
    sampled_rows: int = 0
    tokens: int = 0
    seed: int = 0
    all_experts: bool = False
    held_out: int = 0


@dataclass
class BlockCapture:
    """What was captured of a block.

    Attributes:
        stats: group of linear layers -> statistics of its input.
        kv_ranges: attention module -> ranges of keys and values; empty if not captured.
        rows: drawn rows of the first group's input, `[at most sampled_rows, in]` float32; None where none are drawn.
    """

    stats: dict[str, GroupStats] = field(default_factory=dict)
    kv_ranges: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None


@dataclass(frozen=True)
class TokenIndex:
    """Positions of each modality's tokens among the rows of a layer's input.

    Attributes:
        splits: for each batch, its rows by modality, those that no statistic is taken of left out, here and below.
        drawn: for each batch, its rows in a sample of the tokens of all batches.
        counts: modality -> number of tokens in all samples of all workers.
        layer_draw: subsample of the tokens, for experts with too few; None: the model has no experts.
        held_out: for each batch of held-out samples, the rows that errors are measured on, with their places among all.
        held_counts: modality -> number of these rows of all workers.
    """

    splits: list[Split]
    drawn: list[Split]
    counts: dict[str, int]
    layer_draw: LayerDraw | None
    held_out: list[Split] = field(default_factory=list)
    held_counts: dict[str, int] = field(default_factory=dict)


class InputRecorder:
    """Context manager with hooks on the first linear layer of each group of a block, which collect statistics of inputs.

    Args:
        path: name of the block in the model.
        groups: the groups to record, of `spec`.
        tokens: positions of each modality's tokens.
        device: device on which the block runs.
        stops: end each forward pass when the last group's input is recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        groups: Sequence[Group],
        spec: CaptureSpec,
        tokens: TokenIndex,
        device: torch.device,
        *,
        stops: bool,
    ):
        self.groups, self.spec, self.tokens = groups, spec, tokens
        self.device, self.stops = device, stops
        self.linears: list[Any] = [model.get_submodule(group.linears[0]) for group in groups]
        self.collectors = [Collector(linear.in_features, spec.statistics) for linear in self.linears]
        self.rows = torch.zeros(spec.sampled_rows, self.linears[0].in_features, device=device)
        self.routed = Routed.of(model, groups, tokens.layer_draw, device) if tokens.layer_draw else None
        self.attention = getattr(model.get_submodule(path), "self_attn", None) if spec.kv_cache else None
        self.kv_ranges = {f"{path}.self_attn": KVRange()} if self.attention is not None else {}
        self.held: Split | None = None  # of the current batch, if that is of held-out samples
        self.held_rows: list[dict[str, Tensor]] = [{} for _ in groups]
        self.hooks = ExitStack()

    def __enter__(self) -> InputRecorder:
        for index, linear in enumerate(self.linears):
            self.hooks.callback(linear.register_forward_pre_hook(self._hook(index)).remove)
        if self.routed:
            self.hooks.callback(self.routed.watching().remove)
        for ranges in self.kv_ranges.values():
            self.hooks.callback(record_kv_cache(self.attention, ranges, lambda: self.batch.modality).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    def begin(self, number: int, batch: Batch) -> None:
        """Prepare for a batch."""
        self.number, self.batch = number, batch
        self.recorded: set[int] = set()  # indices of groups
        if self.routed:
            self.routed.begin(number, self.tokens.splits[number])

    def fill(self) -> None:
        """After all batches, run experts that had too few tokens on other tokens."""
        stops, self.stops = self.stops, False
        if self.routed:
            self.routed.fill(self.collectors)
        self.stops = stops

    def begin_held_out(self, number: int) -> None:
        """Prepare for a batch of held-out samples; they come last, and only rows of them are kept."""
        if self.held is None:
            self.hooks.close()
            for index, linear in enumerate(self.linears):
                self.hooks.callback(linear.register_forward_pre_hook(self._hook(index)).remove)
        self.held, self.recorded = self.tokens.held_out[number], set()

    def finish(self, faulty_sample: Callable[[], int | None]) -> BlockCapture:
        """Statistics of all workers. Raises UserError for NaN or Inf among inputs, with the number from `faulty_sample`."""
        problem = None
        for group, collector in zip(self.groups, self.collectors, strict=True):
            try:
                collector.settle()
            except ValueError as error:
                if problem is None:
                    sample = faulty_sample()
                    where = "" if sample is None else f", calibration sample {sample}"
                    problem = f"{group.linears[0]}{where}: {error}"
        distributed.raise_any(problem)
        capture, workers = BlockCapture(), distributed.world_size()
        all_reduce = distributed.all_sum, distributed.all_max
        for index, (group, collector) in enumerate(zip(self.groups, self.collectors, strict=True)):
            counts = self.routed.counts.get(index, self.tokens.counts) if self.routed else self.tokens.counts
            stats = capture.stats[group.name] = collector.pooled(counts, workers, self.device, *all_reduce)
            if self.routed and index in self.routed.owners:
                stats.routed, stats.borrowed = True, self.routed.borrowed.get(index, 0)
            held: dict[str, Tensor] = {}
            for name, count in self.tokens.held_counts.items():
                empty = torch.zeros(count, stats.width, device=self.device)
                rows = distributed.all_sum(self.held_rows[index].get(name, empty).float())
                if rows.isfinite().all() and rows.any():  # an expert may get none of them
                    held[name] = rows.to(torch.bfloat16) if self.linears[index].weight.dtype == torch.bfloat16 else rows
            stats.held_out = GroupStats.of_rows(held) if held else None
        capture.kv_ranges = {name: ranges.pooled(*all_reduce).cpu() for name, ranges in self.kv_ranges.items()}
        if self.spec.sampled_rows:
            capture.rows = distributed.all_sum(self.rows)[: sum(self.tokens.counts.values())].cpu()
        return capture

    def _hook(self, index: int) -> Callable:
        def record(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]  # [..., in]
            if self.held is not None:
                self._keep_held_out(index, x.reshape(-1, x.shape[-1]), self.held)
                self.recorded.add(index)
                if self.stops and len(self.recorded) == len(self.groups):
                    raise StopForward
                return
            if self.routed and index in self.routed.owners:
                split: Split | None = self.routed.split(index)
            else:  # None: rows are not the batch's tokens and count alike
                of_batch = self.tokens.splits[self.number]
                split = of_batch if x.numel() // x.shape[-1] == of_batch.tokens else None
            self.collectors[index].add(x, split)
            if index == 0 and self.spec.sampled_rows and "text" in self.tokens.drawn[self.number].drawn:
                slots, indices = self.tokens.drawn[self.number].drawn["text"]  # the draw distinguishes no modalities
                rows = x.reshape(-1, x.shape[-1]).index_select(0, indices)
                self.rows.index_copy_(0, slots, rows.float())
            self.recorded.add(index)
            if self.stops and len(self.recorded) == len(self.groups):
                raise StopForward

        return record

    def _keep_held_out(self, index: int, x: Tensor, held: Split) -> None:
        """Keep the drawn rows of a group's input `x [rows, in]` of held-out samples; of an expert's those routed to it."""
        owner = self.routed.owners.get(index) if self.routed else None
        if owner is None and len(x) != held.tokens:
            return  # rows are not the batch's tokens
        for name, (places, chosen) in held.drawn.items():
            kept = self.held_rows[index].setdefault(name, x.new_zeros(self.tokens.held_counts[name], x.shape[1]))
            if owner is not None:
                place = places.new_full((held.tokens,), -1).index_copy_(0, chosen, places)[owner.rows]
                chosen = (place >= 0).nonzero().squeeze(1)
                places = place[chosen]
            kept.index_copy_(0, places, x.index_select(0, chosen))


class _RecordingCache:
    """Takes the place of an empty KV cache in one call of an attention module, and records keys and values after RoPE."""

    def __init__(self, ranges: KVRange, mask: Tensor):
        self.ranges, self.mask = ranges, mask

    def update(self, keys: Tensor, values: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Record keys and values `[samples, heads, tokens, channels]` and return them."""
        for index, states in enumerate((keys, values)):
            fits = (states.shape[0], states.shape[2]) == self.mask.shape
            self.ranges.update(index, states, self.mask if fits else None)
        return keys, values


def record_kv_cache(attention: Any, ranges: KVRange, modality: Callable[[], Tensor]) -> RemovableHandle:
    """Record the ranges of an attention module's keys and values as vLLM caches them, until the returned handle is removed.

    vLLM stores `k / k_scale` and `v / v_scale` as float8_e4m3, with one scale each per layer. Without scales it uses 1.0,
    which clips values above 448 and wastes range on small ones.

    Args:
        modality: returns the modality of the current batch's tokens, `[samples, tokens]`.
    """

    # transformers' attention calls `past_key_values.update(keys, values, layer)` after RoPE and attends to what it returns.
    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {"past_key_values": _RecordingCache(ranges, modality())}

    handle: RemovableHandle = attention.register_forward_pre_hook(hook, with_kwargs=True)
    return handle

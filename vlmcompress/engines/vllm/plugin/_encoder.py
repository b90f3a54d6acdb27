"""Encoders in vLLM: signals from CLIP towers, and merging of a tower's rows.

Both work with any attention kernel.

vLLM builds the tower only up to the layer whose output is used, so that is its last layer. If heads are split over several
devices, each device gets the signals of all heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

from vlmcompress.engines.vllm.plugin._served_reducer import ServedReducer
from vlmcompress.models import block_side, spec_for, tile_grid
from vlmcompress.reduction.hooks.tap import join_heads, received
from vlmcompress.reduction.methods import Grid, Merger, Reduction
from vlmcompress.reduction.support import strategy


class Scan:
    """Records the attention of CLS, the first token, and the patches' keys."""

    def __init__(self, layers: nn.ModuleList, shallow: int | None = None):
        """Record the last layer and, for the signal `windowed`, layer `shallow`."""
        if shallow is not None and shallow >= len(layers):
            raise ValueError(
                f"shallow={shallow} is none of the {len(layers)} layers that run (from 0); choose a lower one"
            )
        self._signals: dict[str, Any] = {}
        _hear(layers[-1].self_attn, self._last)
        if shallow is not None:
            _hear(layers[shallow].self_attn, self._shallow)

    def of(self, image: int) -> dict[str, Any]:
        """Fields of `Signals` for the image of that number in the latest run."""
        return {name: value if name == "heads" else value[image] for name, value in self._signals.items()}

    def _last(self, attention: Any, query: Tensor, key: Tensor) -> None:
        keys = all_heads(key, attention.tp_size)[:, 1:]
        heads = attention.num_heads
        self._signals |= {"saliency": _from_cls(attention, query, key), "keys": keys, "heads": heads}

    def _shallow(self, attention: Any, query: Tensor, key: Tensor) -> None:
        self._signals["windowed"] = _from_cls(attention, query, key)


class EncoderMerging:
    """Merges rows between attention and MLP of each layer, down to an exact count per image."""

    def __init__(self, layers: nn.ModuleList, reducer: ServedReducer, config: Any):
        """
        Args:
            config: the model's.
        """
        self._reducer, self._layers, self._config = reducer, len(layers), config
        self._merger: Merger | None = None
        joint = spec_for({"model_type": config.model_type}).tower.joint
        assert joint is not None
        for number, layer in enumerate(layers):
            # vllm/model_executor/models/clip.py::CLIPAttention (and Siglip's, Idefics2's, InternS1's) calls `attn(query, key,
            # value)`, and vllm/model_executor/layers/attention/mm_encoder_attention.py::MMEncoderAttention supports no bias.
            # Can go when it does.
            attention: Any = layer.get_submodule(joint[0])
            attention.attn = _Proportional(attention, self)
            layer.get_submodule(joint[1]).register_forward_pre_hook(functools.partial(self._join, number))

    def begin(self, grids: Sequence[Grid], device: Any, counts: Sequence[int] | None = None) -> Merger:
        """Prepare for a run of the tower on images of these grids; return the merger that will hold their reductions.

        `counts`: number of tokens that each image keeps, for methods with adaptive counts.
        """
        chosen, aside = self._reducer.chosen, int(strategy(self._config) == "default")
        side = block_side(self._config)
        self._merger = Merger(chosen.reducer, grids, self._layers, aside, counts, device, side)
        return self._merger

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias that a layer adds to its attention's logits (see `Merger.bias`)."""
        assert self._merger is not None
        return self._merger.bias(dtype)

    def listen(self, keys: Tensor, heads: int) -> None:
        """Store the keys `[images, rows, heads * d]` of the running attention."""
        self._keys, self._heads = keys, heads

    def _join(self, number: int, module: nn.Module, args: tuple[Tensor]) -> None:
        """Merge rows before the norm after attention, in place, as the layer adds the MLP's output to the same tensor."""
        assert self._merger is not None
        # vllm/model_executor/models/clip.py::CLIPEncoderLayer.forward uses this tensor as the residual of its MLP.
        args[0].data = self._merger.merge(number, args[0].data, self._keys, self._heads)


class TileMerging(EncoderMerging):
    """Merges the tokens of tiles of one size; after the last layer rows are expanded to all patches of a tile."""

    def __init__(self, layers: nn.ModuleList, reducer: ServedReducer, config: Any):
        super().__init__(layers, reducer, config)
        self.counts: list[int] | None = None  # counts for the tiles of the next run; None if the method decides
        self._reductions: Iterator[Reduction] = iter(())
        layers[0].register_forward_pre_hook(self._start)
        layers[-1].register_forward_hook(self._spread)

    def take(self, tiles: int) -> Reduction:
        """The reduction of the next `tiles` tiles of the latest run, which keeps one of each set of merged (equal) tokens."""
        # After `_spread` all patches of a merged token have the same row, so only its anchor is kept.
        parts = [next(self._reductions) for _ in range(tiles)]
        return Reduction.concat([Reduction.keep(reduction.anchor, len(reduction.target)) for reduction in parts])

    def _start(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.begin([tile_grid(self._config)] * len(args[0]), args[0].device, self.counts)

    def _spread(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert self._merger is not None
        self._reductions = iter(self._merger.merged)
        return self._merger.spread(output)


class _Proportional(nn.Module):
    """Attention kernel with keys weighted by their size."""

    def __init__(self, attention: Any, merging: EncoderMerging):
        super().__init__()
        self._all, self._scale, self._merging = attention.num_heads, attention.scale, merging
        self._heads = getattr(attention, "num_heads_per_partition", self._all)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; query, key, value and output are `[b, t, heads * d]`."""
        self._merging.listen(all_heads(key, self._all // self._heads), self._all)
        q, k, v = (heads_first(x, self._heads) for x in (query, key, value))
        bias = self._merging.bias(query.dtype)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self._scale)
        return join_heads(out)


def grid_of(pixels: Tensor, config: Any) -> Grid:
    """The grid of patches of `pixels [..., h, w]`."""
    height, width = pixels.shape[-2:]
    return (1, height // config.vision_config.patch_size, width // config.vision_config.patch_size)


def _hear(attention: Any, listener: Any) -> None:
    """Call `listener(attention, query, key)`, both `[b, t, heads * d]` of this device, whenever `attention` runs."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        # vllm/model_executor/layers/linear.py::QKVParallelLinear returns output and bias; the output is q, k, v side by side.
        query, key, _ = output[0].chunk(3, dim=-1)
        listener(attention, query, key)

    attention.qkv_proj.register_forward_hook(hook)


def _from_cls(attention: Any, query: Tensor, key: Tensor) -> Tensor:
    """Attention of CLS on each patch, mean over all heads: `[b, n]`."""
    heads = attention.num_heads_per_partition
    got = received(heads_first(query[:, :1], heads)[:, :, 0], heads_first(key, heads), attention.scale)[:, 1:]
    # Each device has the mean over its own heads.
    devices = attention.tp_size
    return got if devices == 1 else tensor_model_parallel_all_reduce(got.contiguous()) / devices


def heads_first(x: Tensor, heads: int) -> Tensor:
    """Rearrange `[b, s, heads * d]` as `[b, heads, s, d]`. `vlmcompress.reduction.hooks.tap.join_heads` is the inverse."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def all_heads(rows: Tensor, devices: int) -> Tensor:
    """Gather `[..., all heads * d]` from the heads of each of `devices`, `[..., heads * d]`."""
    # vllm/distributed/communication_op.py::tensor_model_parallel_all_gather joins the last dimension, in the order of devices.
    return rows if devices == 1 else tensor_model_parallel_all_gather(rows.contiguous())

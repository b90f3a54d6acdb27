"""Encoders in vLLM: signals from CLIP towers, merging of a tower's rows, and Qwen towers on some of an image's tokens.

Signals and merging work whatever kernel a tower's attention runs.

vLLM builds the tower up to the layer whose output is used, so that one is the last. Where heads are spread over several
devices, each device gets the signals of all heads.

Tokens that a reducer drops by their pixels never enter a Qwen tower. The tokens are chosen where the processor has the
pixels, before the prompt's length is known; the choice goes with the image. vLLM's towers also take as arguments what they
derive from an image's grid (rotary and learnt positions, windows, the lengths of attention); it is computed for the full grid
by their own functions, and the part of the kept patches is handed in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

from vlmcompress.engines.vllm.plugin._loading import sent
from vlmcompress.engines.vllm.plugin._served_reducer import ServedReducer
from vlmcompress.models import spec_for
from vlmcompress.reduction.hooks.pixels import signals
from vlmcompress.reduction.hooks.tap import joined, received
from vlmcompress.reduction.hooks.units import block, tile
from vlmcompress.reduction.methods import Grid, Merger, Reduction
from vlmcompress.reduction.support import strategy


class Scan:
    """Listens to attention, for the attention of CLS, the first token, and the patches' keys."""

    def __init__(self, layers: nn.ModuleList, shallow: int | None = None):
        """Listen to the last layer and, for the signal `windowed`, to the layer of number `shallow`."""
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
    """Merges rows between attention and MLP of each layer, down to an exact count of each image."""

    def __init__(self, layers: nn.ModuleList, reducer: ServedReducer, config: Any):
        """
        Args:
            config: the model's.
        """
        self._reducer, self._layers, self._config = reducer, len(layers), config
        self._merger: Merger | None = None
        joint = spec_for({"model_type": config.model_type}).vision_joint
        assert joint is not None
        for number, layer in enumerate(layers):
            # vllm/model_executor/models/clip.py::CLIPAttention (and Siglip's, Idefics2's, InternS1's) calls `attn(query, key,
            # value)`, which has no bias in vllm/model_executor/layers/attention/mm_encoder_attention.py::MMEncoderAttention.
            # Goes when it has one.
            attention: Any = layer.get_submodule(joint[0])
            attention.attn = _Proportional(attention, self)
            layer.get_submodule(joint[1]).register_forward_pre_hook(functools.partial(self._join, number))

    def begin(self, grids: Sequence[Grid], device: Any, counts: Sequence[int] | None = None) -> Merger:
        """Prepare for a run of the tower on images of these grids; return the merger that will hold their reductions.

        `counts`: number of tokens that each image keeps, where the method leaves that open.
        """
        chosen, aside = self._reducer.chosen, int(strategy(self._config) == "default")
        side = block(self._config)
        self._merger = Merger(chosen.module, chosen.options, grids, self._layers, aside, counts, device, side)
        return self._merger

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias that a layer adds to its attention's logits (see `Merger.bias`)."""
        assert self._merger is not None
        return self._merger.bias(dtype)

    def listen(self, keys: Tensor, heads: int) -> None:
        """Note the keys `[images, rows, heads * d]` of the attention that runs."""
        self._keys, self._heads = keys, heads

    def _join(self, number: int, module: nn.Module, args: tuple[Tensor]) -> None:
        """Merge rows before the norm after attention, in place, as the layer adds the MLP's rows to the same tensor."""
        assert self._merger is not None
        # vllm/model_executor/models/clip.py::CLIPEncoderLayer.forward keeps this tensor as the residual of its MLP.
        args[0].data = self._merger.merge(number, args[0].data, self._keys, self._heads)


class TileMerging(EncoderMerging):
    """Merges the tokens of tiles of one size; after the last layer each of a tile's patches gets its row back."""

    def __init__(self, layers: nn.ModuleList, reducer: ServedReducer, config: Any):
        super().__init__(layers, reducer, config)
        self.counts: list[int] | None = None  # of the tiles of the next run; None where the method decides them
        self._found: Iterator[Reduction] = iter(())
        layers[0].register_forward_pre_hook(self._start)
        layers[-1].register_forward_hook(self._spread)

    def take(self, tiles: int) -> Reduction:
        """What to keep of the next `tiles` tiles of the latest run: of tokens that have become one, all equal, one."""
        parts = [next(self._found) for _ in range(tiles)]
        return Reduction.concat([Reduction.keep(reduction.anchor, len(reduction.target)) for reduction in parts])

    def _start(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.begin([tile(self._config)] * len(args[0]), args[0].device, self.counts)

    def _spread(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert self._merger is not None
        self._found = iter(self._merger.merged)
        return self._merger.spread(output)


class _Proportional(nn.Module):
    """Kernel of an attention module in which keys count by their size."""

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
        return joined(out)


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
    return mean_of_all(got, attention.tp_size)


def choose(reducer: ServedReducer, images_of: Any, pixel_values: Tensor, grids: Tensor) -> Tensor:
    """Choose the tokens that are kept of all images, `[tokens]` bool.

    Args:
        images_of: the image processor, which made the other two arguments.
        pixel_values: `[patches, d]`, or the levels 0 to 255 themselves where the model normalizes them.
        grids: `[images, 3]`, frames, rows and columns of patches.
    """
    images = signals(images_of, pixel_values, grids)
    return torch.cat([reducer.reduce(image.grid, pixels=image.pixels).target >= 0 for image in images])


def encode(tower: Any, pixel_values: Tensor, grids: Sequence[Sequence[int]], kept: Tensor) -> Tensor:
    """Run the tower on the `m` tokens that are kept of all images; returns its output `[m, d]`.

    Args:
        tower: the tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL.
        pixel_values: `[patches, d]` of all images.
        grids: frames, rows and columns of patches, of each image.
        kept: `[tokens]` bool on the CPU, at least one of each frame.
    """
    patches = kept.repeat_interleave(tower.spatial_merge_size**2)
    rows = _places(patches, pixel_values.device)
    full = tower.prepare_encoder_metadata(grids)
    frames = np.cumsum([0, *(h * w for t, h, w in grids for _ in range(t))], dtype=np.int32)
    if "window_index" in full:
        metadata = _windows(tower, full, grids, kept) | _lengths(tower, _left(frames, patches), "_full")
    else:
        names = ("rotary_pos_emb_cos", "rotary_pos_emb_sin", "pos_embeds")
        metadata = {name: full[name][rows] for name in names if name in full}
        metadata |= _lengths(tower, _left(frames, patches))
    return tower(pixel_values[rows], None, encoder_metadata=metadata)


def _places(mask: Tensor, device: torch.device) -> Tensor:
    """The places, on `device`, where a mask on the CPU is true; as an index a mask makes the host wait for their number."""
    return sent(mask.nonzero().squeeze(1), device)


def _windows(tower: Any, full: dict[str, Tensor], grids: Sequence[Sequence[int]], kept: Tensor) -> dict[str, Any]:
    """Arguments of Qwen2.5-VL's tower, which brings tokens into the order of their windows first."""
    orders, ends, start, square = [], [np.zeros(1, dtype=np.int32)], 0, tower.spatial_merge_size**2
    for t, h, w in grids:
        _, _, order, windows, _ = tower.get_rope_by_thw(t, h, w)  # the last three are on the CPU
        orders.append(order + start // square)
        ends.append(windows.numpy() + start)
        start += t * h * w
    order = torch.cat(orders)
    inside = kept[order]
    index = (kept.cumsum(0) - 1)[order[inside]]
    patches, device = inside.repeat_interleave(square), full["rotary_pos_emb_cos"].device
    rows = _places(patches, device)
    metadata = {name: full[name][rows] for name in ("rotary_pos_emb_cos", "rotary_pos_emb_sin")}
    metadata["window_index"] = sent(index, device)
    metadata["reverse_indices"] = sent(index.argsort(), device)
    windows = _lengths(tower, _left(np.concatenate(ends), patches), "_window")
    return metadata | {name.replace("cu_seqlens", "cu_window_seqlens"): value for name, value in windows.items()}


def _left(ends: np.ndarray, patches: Tensor) -> np.ndarray:
    """Cumulative lengths `[parts + 1]` of sequences of which only `patches [n]` are left; empty sequences are dropped."""
    counts = np.append(0, patches.numpy().cumsum(dtype=np.int32))
    return np.unique(counts[ends]).astype(np.int32)


def _lengths(tower: Any, ends: np.ndarray, suffix: str = "") -> dict[str, Any]:
    """The attention kernel's arguments for sequences that end at `ends`, as the tower itself makes them."""
    from vllm.model_executor.layers.attention import MMEncoderAttention as Attention

    backend, device = tower.attn_backend, tower.device
    if hasattr(tower, "compute_attn_mask_seqlen") and not hasattr(tower, "fp8_padded_hidden_size"):  # Qwen2-VL
        cumulative = torch.from_numpy(ends)
        return {
            "cu_seqlens": sent(cumulative, device),
            "max_seqlen": tower.compute_attn_mask_seqlen(cumulative),
        }
    padded = {"fp8_padded_hidden_size": tower.fp8_padded_hidden_size}
    return {
        "cu_seqlens": Attention.maybe_recompute_cu_seqlens(
            backend, ends, tower.hidden_size, tower.tp_size, device, **padded
        ),
        f"max_seqlen{suffix}": torch.tensor(Attention.compute_max_seqlen(backend, ends), dtype=torch.int32),
        f"sequence_lengths{suffix}": Attention.maybe_compute_seq_lens(backend, ends, device),
    }


def heads_first(x: Tensor, heads: int) -> Tensor:
    """Rearrange `[b, s, heads * d]` as `[b, heads, s, d]`. `vlmcompress.reduction.hooks.tap.joined` is the inverse."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def all_heads(rows: Tensor, devices: int) -> Tensor:
    """Gather `[..., all heads * d]` from the heads of each of `devices`, `[..., heads * d]`."""
    # vllm/distributed/communication_op.py::tensor_model_parallel_all_gather joins the last dimension, in the order of devices.
    return rows if devices == 1 else tensor_model_parallel_all_gather(rows.contiguous())


def mean_of_all(mean: Tensor, devices: int) -> Tensor:
    """Average over `devices` each one's mean over its own heads: the mean over all heads."""
    return mean if devices == 1 else tensor_model_parallel_all_reduce(mean.contiguous()) / devices

"""Merging within an encoder, for methods with `merge`: the rows of each image that each layer leaves.

An engine calls `bias` before a layer's attention and `merge` between that and the MLP, in each layer that merges:

    merger = Merger(reducer, grids, layers, aside=1)
    for layer in range(layers):
        states = states + attention(norm1(states), keys_bias=merger.bias(states.dtype))
        states = merger.merge(layer, states, keys, heads)
        states = states + mlp(norm2(states))

Images with fewer rows are padded on the right; nothing attends to the padding. To avoid a device sync, a method whose
counts depend on values (`dymu`) pads them itself.

If a token is a block of `side` x `side` patches (pixel shuffle or pooling after the encoder), whole blocks merge, patch by
patch: a merged block consists of the mean of the upper left patches, the mean of the upper right ones, and so on, so that each
token is still a block of patches after the encoder. The key of a block is the concatenation of its patches' keys, not their
mean: blocks are similar if the patches that would be averaged are. In attention each of its patches is weighted by the block's
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vlmcompress.reduction.methods._base import Grid, Reducer, Reduction, Signals
from vlmcompress.reduction.methods._run import merge_layer


class Merger:
    """The merging of the images of one run of the encoder.

    Rows are patches. They stay in the encoder's raster order, bit for bit, until something merges; from then on the patches of
    a block are adjacent, and blocks are in raster order. `spread` restores the original order.

    merged: for each image, the reduction of its grid by the layers so far.
    counts: number of tokens that each image keeps after the last layer; None if the method decides.
    """

    def __init__(
        self,
        reducer: Reducer,
        grids: Sequence[Grid],
        layers: int,
        aside: int = 0,
        counts: Sequence[int] | None = None,
        device: Any = None,
        side: int = 1,
    ):
        """
        Args:
            reducer: one that merges.
            grids: grid of each image's tokens.
            layers: number of layers that merge.
            aside: number of leading rows that are not grid tokens and stay, such as CLS. counts: see above; None: the
            method decides them all. side: a token is `side` x `side` patches.
        """
        self.reducer, self.grids, self.layers, self.aside = reducer, grids, layers, aside
        self.counts: list[int | None] = [None] * len(grids) if counts is None else list(counts)
        self.merged = [Reduction.identity(rows * columns * t, device) for t, rows, columns in grids]
        self.side, self._square = side, side**2
        self._orders = {grid: raster(grid, side).to(device, non_blocking=True) for grid in {*grids}} if side > 1 else {}

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias `[images, 1, 1, keys]` to add to the attention's logits: log of each key's size, -inf for padding.

        It is None while nothing has merged.
        """
        if self._whole:
            return None
        # Proportional attention of ToMe: softmax(q k + log size); CLS has size 1, and log 0 = -inf hides padding.
        ones = self.merged[0].weight.new_ones(self.aside)
        sizes = [
            torch.cat([ones, reduction.sizes.float().repeat_interleave(self._square)]) for reduction in self.merged
        ]
        return pad_sequence(sizes, batch_first=True).log().to(dtype)[:, None, None]

    def merge(self, layer: int, states: Tensor, keys: Tensor, heads: int) -> Tensor:
        """Apply this layer's merges to the rows `[images, rows, d]`; without any, return the same tensor.

        Args:
            states: `[images, rows, d]` after the layer's attention, residual added.
            keys: `[images, rows, dk]`, keys of that attention, heads concatenated.
        """
        parts, steps = [], []
        for image, count in enumerate(self.counts):
            signals = self.signals(image, keys, heads)
            steps.append(merge_layer(self.reducer, signals, layer, self.layers, count, check=False))
            # [tokens, side * side, d] -> means block by block, then patches in a row again.
            rows = steps[-1].apply(self._blocks(image, states)).flatten(0, 1)
            parts.append(torch.cat([states[image, : self.aside], rows]))
        self.merged = [reduction.then(step) for reduction, step in zip(self.merged, steps, strict=True)]
        return states if all(map(_keeps_all, steps)) else pad_sequence(parts, batch_first=True)

    def signals(self, image: int, keys: Tensor, heads: int) -> Signals:
        """The signals of an image's remaining rows; arguments as in `merge`."""
        rows = self._blocks(image, keys).unflatten(2, (heads, -1)).transpose(1, 2).flatten(1)
        # A NaN check would sync the device once per layer and image.
        return Signals(self.grids[image], keys=rows, heads=heads, merged=self.merged[image], finite=True)

    def spread(self, states: Tensor) -> Tensor:
        """Expand rows to patches in raster order: `[images, rows, d]` -> `[images, aside + patches, d]`."""
        if self._whole:
            return states
        # Every patch of a merged token gets the token's row, as pixel shuffle needs the whole grid.
        full = states.new_empty(len(states), self.aside + len(self.merged[0].target) * self._square, states.shape[2])
        full[:, : self.aside] = states[:, : self.aside]
        for image, merged in enumerate(self.merged):
            rows = self._blocks(image, states)[merged.target].flatten(0, 1)
            order = self._orders.get(self.grids[image], slice(None))
            full[image, self.aside :][order] = rows
        return full

    @property
    def _whole(self) -> bool:
        """Whether nothing has merged so far."""
        return all(map(_keeps_all, self.merged))

    def _blocks(self, image: int, rows: Tensor) -> Tensor:
        """The rows `[images, rows, d]` of one image's tokens, block by block: `[tokens left, side * side, d]`."""
        image_rows = rows[image, self.aside : self.aside + len(self.merged[image].anchor) * self._square]
        if self.side > 1 and self._whole:
            image_rows = image_rows[self._orders[self.grids[image]]]
        return image_rows.unflatten(0, (-1, self._square))


def _keeps_all(reduction: Reduction) -> bool:
    """Whether the host knows, without reading values, that nothing was merged."""
    return reduction.plain and len(reduction.anchor) == len(reduction.target)


def raster(grid: Grid, side: int) -> Tensor:
    """Places `[patches]` in raster order of an image's patches, block by block; each of `grid`'s tokens is `side` x `side`."""
    t, rows, columns = grid
    places = torch.arange(t * rows * columns * side**2).view(t, rows, side, columns, side)
    return places.transpose(2, 3).flatten()

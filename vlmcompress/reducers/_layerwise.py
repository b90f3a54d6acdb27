"""Merging in the layers of an encoder, for methods that have `merge`: the rows that each layer leaves of each image.

An engine calls `bias` before a layer's attention and `merge` between that and the MLP, in each layer that merges:

    merger = Merger(method, options, grids, layers, aside=1)
    for layer in range(layers):
        states = states + attention(norm1(states), keys_bias=merger.bias(states.dtype))
        states = merger.merge(layer, states, keys, heads)
        states = states + mlp(norm2(states))

Images that have been left with fewer rows than others are padded on the right; nothing attends to the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vlmcompress.reducers._base import Grid, ReducerOptions, Reduction, Signals
from vlmcompress.reducers._run import merge


class Merger:
    """The merging of the images of one run of the encoder.

    merged: for each image, the reduction of its grid by the layers so far.
    counts: number of tokens that each image is to keep behind the last layer; None where the method decides it.
    """

    def __init__(
        self,
        method: ModuleType,
        options: ReducerOptions,
        grids: Sequence[Grid],
        layers: int,
        aside: int = 0,
        counts: Sequence[int] | None = None,
        device: Any = None,
    ):
        """
        Args:
            method: a reducer with `merge`.
            grids: grid of each image.
            layers: number of layers that merge.
            aside: number of rows before the grid's that are no tokens and stay, such as CLS.
            counts: see above; None: the method decides them all.
        """
        self.method, self.options, self.grids, self.layers, self.aside = method, options, grids, layers, aside
        self.counts: list[int | None] = [None] * len(grids) if counts is None else list(counts)
        self.merged = [Reduction.identity(rows * columns * t, device) for t, rows, columns in grids]

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias `[images, 1, 1, keys]` to add to the attention's logits: log of each key's size, -inf for padding.

        It is None while each row is one token.
        """
        if all(len(one.anchor) == len(one.target) for one in self.merged):
            return None
        ones = self.merged[0].weight.new_ones(self.aside)
        sizes = [torch.cat([ones, one.sizes.float()]) for one in self.merged]
        return pad_sequence(sizes, batch_first=True).log().to(dtype)[:, None, None]

    def merge(self, layer: int, states: Tensor, keys: Tensor, heads: int) -> Tensor:
        """Do this layer's merges on the rows `[images, rows, d]`; returns the same tensor when there are none.

        Args:
            states: `[images, rows, d]` behind the layer's attention, residual added.
            keys: `[images, rows, dk]`, keys of that attention, heads concatenated.
        """
        parts, before = [], [len(one.anchor) for one in self.merged]
        for image, count in enumerate(self.counts):
            rows, merged = slice(self.aside, self.aside + before[image]), self.merged[image]
            signals = Signals(self.grids[image], keys=keys[image, rows], heads=heads, merged=merged)
            step = merge(self.method, signals, self.options, layer, self.layers, count)
            parts.append(torch.cat([states[image, : self.aside], step.apply(states[image, rows])]))
            self.merged[image] = merged.then(step)
        same = before == [len(one.anchor) for one in self.merged]
        return states if same else pad_sequence(parts, batch_first=True)

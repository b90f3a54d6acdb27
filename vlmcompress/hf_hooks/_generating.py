"""Apply reducers that drop visual tokens while the answer grows, from the caches of decoder block K and all behind it.

The prompt runs in full. The attention of its last token, and then of each new one, in block K - 1 decides which tokens
stay; block K - 1 itself and those before keep everything. Each image is judged by the attention on it alone. Without a
cache nothing is dropped.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from vlmcompress import reducers
from vlmcompress.errors import UserError
from vlmcompress.hf_hooks._attach import full_mask
from vlmcompress.hf_hooks._inside import Inside
from vlmcompress.hf_hooks.slots import Slots
from vlmcompress.hf_hooks.units import Reduced, Unit
from vlmcompress.reducers import Reduction, Signals

_Left = list[tuple[int, Reduced]]
"""The reduced images in a cache, each behind the column of the full sequence at which its call began."""


class Generating(Inside):
    """Shortens caches after each call. Later calls use them as those of `Inside`."""

    def _hook(self) -> None:
        super()._hook()
        self._left: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()
        self._keys: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()  # cache -> block K's
        self._step: tuple[list[Unit], Tensor, Slots | None, int] | None = None
        self._heard: tuple[Tensor, Tensor, float] | None = None

    @property
    def stages(self) -> list[tuple[int, list[Reduced]]]:
        """Units of the latest call with images as the latest step has left them."""
        return [(self.options.layer, self.seen)]

    def _listen(self, query: Tensor, key: Tensor, scale: float) -> None:
        if self._step is not None:
            self._heard = query, key, scale

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: tuple[Slots, ...] | None) -> dict[str, Any]:
        """Return the arguments as they are, and keep what is needed after the call."""
        cache: Any = kwargs.get("past_key_values")
        if past is not None and cache.layers[self.options.layer].keys is not self._keys.get(cache):
            raise UserError(
                "tokens were dropped from a cache that was then cut or reordered (beam search?); start over"
            )
        before = cache.get_seq_length() if cache is not None else 0
        self._step = units, full_mask(kwargs, before).bool(), past[0] if past else None, before
        return super()._reduce(kwargs, [], past)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Hook after the language model: drop tokens from the caches."""
        cache, step, heard = getattr(output, "past_key_values", None), self._step, self._heard
        self._step = self._heard = self._new = None
        if cache is None or step is None or heard is None:
            return
        units, mask, past, before = step
        old: _Left = list(self._left.get(cache, ())) if past is not None else []
        whole = [Reduction.identity(len(unit.columns), mask.device) for unit in units]
        old += [(before, Reduced(**vars(unit), reduction=one)) for unit, one in zip(units, whole, strict=True)]
        attention = self._attention(heard, mask, before)
        left = [(start, self._fewer(unit, attention[unit.row, start + unit.columns])) for start, unit in old]
        self.seen = [unit for start, unit in left if start == left[-1][0]]
        layout = past or Slots.identity(len(mask), 0, mask.device)
        layout = layout.then(mask.shape[1] - layout.length, Slots.identity(len(mask), 0, mask.device))
        if _count(left) < _count(old):
            keep = torch.ones_like(mask)
            for start, unit in left:
                keep[unit.row, start + unit.columns] = unit.reduction.target >= 0
            fewer = Slots.of(keep, mask)
            self._cut(cache, layout.slots(fewer), layout.width)
            layout = fewer
        self._left[cache], self._caches[cache] = left, (layout,)
        self._keys[cache] = cache.layers[self.options.layer].keys

    def _end(self, *arguments: object) -> None:
        super()._end(*arguments)
        self._step = self._heard = None

    def _fewer(self, unit: Reduced, attention: Tensor) -> Reduced:
        """Reduce an image further, by the newest token's `attention [n]` on its tokens."""
        done = unit.reduction
        signals = Signals(unit.grid, saliency=attention[done.anchor], merged=done)
        return replace(unit, reduction=done.then(reducers.reduce(self.module, signals, self.options)))

    def _cut(self, cache: Any, slots: Tensor, width: int) -> None:
        """Cut the caches of block K and those behind it from `width` slots to `slots [b, m]`."""
        layers: Any = cache.layers[self.options.layer :]
        known = all(isinstance(layer, DynamicLayer) for layer in layers)
        if not known or any(layer.keys.shape[2] != width for layer in layers):
            raise UserError("tokens can be dropped from a DynamicCache that holds all others; use the default cache")
        for layer in layers:
            index = slots[:, None, :, None]
            layer.keys, layer.values = (torch.take_along_dim(part, index, 2) for part in (layer.keys, layer.values))
            if layer.is_sliding:
                layer.cumulative_length = slots.shape[1]


def _count(left: _Left) -> int:
    return sum(len(unit.reduction.anchor) for _, unit in left)

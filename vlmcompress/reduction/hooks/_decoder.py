"""Attachments that work within the decoder's blocks, for reducers of stage "llm".

`Inside` drops visual tokens at decoder block K: from there on the language model has fewer rows and shorter caches.

`Generating` drops them during generation, from the caches of block K and all later ones. The prompt runs in full. The
attention of its last token, and then of each new one, in block K - 1 determines which tokens stay; blocks up to K - 1 keep
everything. Each image is judged only by the attention on it. Without a cache nothing is dropped.

`Blocks` restricts which tokens of the prompt attend to each other, and drops none.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask

from vlmcompress.reduction import methods
from vlmcompress.reduction.hooks._attach import Attachment, full_mask, merged_rows
from vlmcompress.reduction.hooks.tap import join_heads, received, tap
from vlmcompress.reduction.hooks.units import Reduced, Slots, Unit
from vlmcompress.reduction.methods import Signals, pevlm
from vlmcompress.utils.errors import UserError


class Inside(Attachment):
    """Shortens the hidden states before block K, and mask and rotations for it and all later blocks.

    For a cache the slots of block K are stored; columns always refer to the full sequence.
    """

    def _hook(self) -> None:
        self._pending: tuple[list[Unit], Tensor, Slots, int] | None = None  # of this call, until block K
        self._states: tuple[Tensor, Tensor, float] | None = None  # queries and keys of block K - 1
        self._now: tuple[Slots, Any] | None = (
            None  # this call's remaining tokens and the mask from block K on; None: all
        )
        blocks: Any = self.text.get_submodule("layers")
        assert self.reducer.layer is not None
        self._layer = self.reducer.layer  # K
        # FastV's layer K - 1, whose attention decides what block K gets.
        self._undo.append(tap(blocks[self._layer - 1].self_attn, self._listen))
        self._before(blocks[self._layer], self._drop)
        for block in blocks[self._layer :]:
            self._before(block, self._shorten)

    @property
    def stages(self) -> list[tuple[int, list[Reduced]]]:
        """Block K with the units of the latest call with images."""
        return [(self._layer, self.reduced_units)]

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        super()._begin(module, args, kwargs)
        self._pending = self._states = self._now = None

    def _end(self, *_: object) -> None:
        super()._end()
        self._pending = self._states = self._now = None

    def _listen(self, query: Tensor, key: Tensor, scale: float) -> None:
        if self._pending is not None and self._pending[0]:
            self._states = query, key, scale

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        """Return the arguments unchanged, for the first blocks, and store what block K needs."""
        cache, embeds = kwargs.get("past_key_values"), kwargs["inputs_embeds"]
        before = cache.get_seq_length() if cache is not None else 0  # length of block 0's cache, which lacks nothing
        held = past or Slots.identity(len(embeds), before, embeds.device)
        if before < held.length:
            raise UserError("the cache was cut within the prompt, which a reducer does not follow; start over")
        self._pending = units, full_mask(kwargs, before), held, before
        self._new = past
        return kwargs

    def _shorten(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Hook before block K and each after it: shorten its rotations and positions, and set its mask."""
        if self._now is None:
            return None
        rows, mask = self._now
        rotations = tuple(rows.pick(part, part.ndim - 2) for part in kwargs["position_embeddings"])
        positions = kwargs.get("position_ids")
        if positions is not None:
            positions = rows.pick(positions, positions.ndim - 1)
        changed = {"position_embeddings": rotations, "position_ids": positions, "attention_mask": mask}
        return args, kwargs | changed

    def _drop(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Hook before block K: decide all reductions, and leave only the kept rows of its hidden states `[b, s, d]`."""
        if self._pending is None:
            return None
        (units, mask, held, before), hidden = self._pending, args[0]
        config: Any = self.text.config
        if units:
            self.reduced_units = []
            self._decide(units, self._signals(units, hidden, mask.bool(), before))
            hidden = merged_rows(hidden, self.reduced_units)
        self._states = self._pending = None
        left = self._remaining(self.reduced_units if units else [], mask[:, before:].bool(), held, before)
        if left is None:
            return None
        new, layout = left
        hidden = new.pick(hidden)
        # transformers makes one mask for all blocks, of the full length; blocks from here on need one of their own length.
        causal = create_causal_mask(
            config=config,
            inputs_embeds=hidden,
            attention_mask=layout.mask(mask),
            past_key_values=kwargs.get("past_key_values"),
            layer_idx=self._layer,
        )
        self._now = new, causal
        return (hidden, *args[1:]), kwargs

    def _signals(self, units: list[Unit], hidden: Tensor, mask: Tensor, before: int) -> list[Signals]:
        """Signals from block K - 1: attention, keys, and states through the final norm."""
        assert self._states is not None
        key, tokens = self._states[1], hidden.shape[1]
        saliency = self._attention(self._states, mask, before)[:, before:]
        keys = join_heads(key)[:, before:]
        needs = self.reducer.NEEDS
        states = self.text.get_submodule("norm")(hidden) if "features" in needs else None
        words = self._words(mask[:, before:]) if "query" in needs else None
        signals = []
        for unit in units:
            row, columns = unit.row, unit.columns
            optional: dict[str, Any] = {"saliency": saliency[row, columns], "keys": keys[row, columns]}
            if states is not None and words is not None:
                after = words[row] & (torch.arange(tokens, device=words.device) > columns[-1])
                optional |= {"features": states[row, columns], "query": states[row, after]}
                optional["query_keys"] = keys[row, after]
            signals.append(Signals(unit.grid, heads=key.shape[1], **optional))
        return signals

    def _attention(self, states: tuple[Tensor, Tensor, float], mask: Tensor, before: int) -> Tensor:
        """Attention `[b, before + s]` of the last real token on the full sequence; `mask` covers the full sequence."""
        query, key, scale = states
        rows = torch.arange(len(query), device=query.device)
        last = (mask[:, before:] * torch.arange(1, query.shape[2] + 1, device=mask.device)).argmax(1)
        visible = mask & (torch.arange(mask.shape[1], device=mask.device) <= before + last[:, None])
        return received(query[rows, :, last], key, scale, visible)


_Left = list[tuple[int, Reduced]]
"""The reduced images in a cache, each after the column of the full sequence at which its call began."""


class Generating(Inside):
    """Shortens caches after each call. Later calls use them as with `Inside`."""

    def _hook(self) -> None:
        super()._hook()
        self._left: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()
        self._keys: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()  # cache -> block K's
        self._step: tuple[list[Unit], Tensor, Slots | None, int] | None = None
        self._heard: tuple[Tensor, Tensor, float] | None = None

    def _listen(self, query: Tensor, key: Tensor, scale: float) -> None:
        if self._step is not None:
            self._heard = query, key, scale

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        """Return the arguments unchanged, and store what is needed after the call."""
        cache: Any = kwargs.get("past_key_values")
        if past is not None and cache.layers[self._layer].keys is not self._keys.get(cache):
            raise UserError(
                "tokens were dropped from a cache that was then cut or reordered (beam search?); start over"
            )
        before = cache.get_seq_length() if cache is not None else 0
        self._step = units, full_mask(kwargs, before).bool(), past, before
        return super()._reduce(kwargs, [], past)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Hook after the language model: drop tokens from the caches."""
        cache, step, heard = getattr(output, "past_key_values", None), self._step, self._heard
        self._step = self._heard = self._new = None
        if cache is None or step is None or heard is None:
            return
        units, mask, past, before = step
        old: _Left = list(self._left.get(cache, ())) if past is not None else []
        old += [(before, unit.whole()) for unit in units]
        # [b, t], of the newest token on everything in the cache.
        attention = self._attention(heard, mask, before)
        left = [(start, self._fewer(unit, attention[unit.row, start + unit.columns])) for start, unit in old]
        self.reduced_units = [unit for start, unit in left if start == left[-1][0]]
        layout = past or Slots.identity(len(mask), 0, mask.device)
        layout = layout.then(mask.shape[1] - layout.length, Slots.identity(len(mask), 0, mask.device))
        if _count(left) < _count(old):
            keep = torch.ones_like(mask)
            for start, unit in left:
                keep[unit.row, start + unit.columns] = unit.reduction.target >= 0
            fewer = Slots.of(keep, mask)
            self._cut(cache, layout.slots_of(fewer), layout.width)
            layout = fewer
        self._left[cache], self._caches[cache] = left, layout
        self._keys[cache] = cache.layers[self._layer].keys

    def _end(self, *arguments: object) -> None:
        super()._end(*arguments)
        self._step = self._heard = None

    def _fewer(self, unit: Reduced, attention: Tensor) -> Reduced:
        """Reduce an image further, by the newest token's `attention [n]` on its tokens."""
        done = unit.reduction
        signals = Signals(unit.grid, saliency=attention[done.anchor], merged=done)
        return replace(unit, reduction=done.then(methods.reduce(self.reducer, signals)))

    def _cut(self, cache: Any, slots: Tensor, width: int) -> None:
        """Cut the caches of block K and those after it from `width` slots to `slots [b, m]`."""
        layers: Any = cache.layers[self._layer :]
        is_dynamic = all(isinstance(layer, DynamicLayer) for layer in layers)
        if not is_dynamic or any(layer.keys.shape[2] != width for layer in layers):
            raise UserError("tokens can be dropped from a DynamicCache that holds all others; use the default cache")
        for layer in layers:
            index = slots[:, None, :, None]
            layer.keys, layer.values = (torch.take_along_dim(part, index, 2) for part in (layer.keys, layer.values))
            # transformers/cache_utils.py::DynamicSlidingWindowLayer counts processed tokens separately from stored ones.
            if layer.is_sliding:
                layer.cumulative_length = slots.shape[1]


def _count(left: _Left) -> int:
    return sum(len(unit.reduction.anchor) for _, unit in left)


class Blocks(Attachment):
    """Passes the method's own mask to the language model in calls with images. Generated tokens see everything.

    An image, or a tile in families whose tiles are separate units, counts as a frame. The mask is dense: this shows the effect
    of the method on answers, and saves no time.
    """

    def _hook(self) -> None:
        kernel = self.vlm.model.config.get_text_config()._attn_implementation
        if kernel != "sdpa":
            raise UserError(
                f"attention '{kernel}' takes no mask of blocks; load the model with attn_implementation='sdpa'"
            )

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        cache = kwargs.get("past_key_values")
        before = cache.get_seq_length() if cache is not None else 0
        mask = full_mask(kwargs, before).bool()
        self.reduced_units = [unit.whole() for unit in units]
        tokens = mask.shape[1] - before
        rows_parts = [self._parts(units, row, tokens) for row in range(len(mask))]
        if all(parts is None for parts in rows_parts):
            return kwargs
        # transformers uses a four-dimensional mask unchanged (`masking_utils.py::_preprocess_mask_arguments`).
        visible = mask[:, None].repeat(1, tokens, 1)  # [b, s, before + s]
        plain = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
        for row_mask, parts in zip(visible, rows_parts, strict=True):
            row_mask[:, before:] &= plain if parts is None else pevlm.mask(parts).to(mask.device)
        visible[:, :, before:] |= torch.eye(tokens, dtype=torch.bool, device=mask.device)  # padding sees itself
        return kwargs | {"attention_mask": visible[:, None]}

    def _parts(self, units: list[Unit], row: int, tokens: int) -> list[int] | None:
        """Lengths of the sink, the blocks and the question of a row of `tokens`; None if there is at most one block."""
        images = sorted({unit.span for unit in units if unit.row == row})
        parts = self.reducer.attention_parts(images, tokens) if images else []
        return parts if len(parts) > 3 else None

"""Drops visual tokens at a block of the decoder, for reducers of stage "llm": from there on the language model has fewer rows
and shorter caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from vlmcompress.reduction.hooks._attach import Attachment, full_mask, merged_rows
from vlmcompress.reduction.hooks.tap import join_heads, received, tap
from vlmcompress.reduction.hooks.units import Reduced, Slots, Unit, prompt_text
from vlmcompress.reduction.methods import Signals
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
        assert self._states is not None and self._call is not None
        key, tokens = self._states[1], hidden.shape[1]
        saliency = self._attention(self._states, mask, before)[:, before:]
        keys = join_heads(key)[:, before:]
        needs = self.reducer.NEEDS
        states = self.text.get_submodule("norm")(hidden) if "features" in needs else None
        words = prompt_text(self.vlm, self._call.get("input_ids"), mask[:, before:]) if "query" in needs else None
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

"""Apply reducers of stage "llm": from decoder block K on the language model has fewer rows and shorter caches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from vlmcompress.errors import UserError
from vlmcompress.reducers import Signals
from vlmcompress.reduction._attach import Attachment, full_mask
from vlmcompress.reduction.slots import Slots
from vlmcompress.reduction.tap import joined, received, tap
from vlmcompress.reduction.units import Unit


class Inside(Attachment):
    """Shortens the hidden states before block K, and mask and rotations for it and all blocks behind."""

    def _hook(self) -> None:
        self._pending: tuple[list[Unit], Tensor, Slots, int] | None = None  # state of this call, until block K
        self._states: tuple[Tensor, Tensor, float] | None = None  # queries and keys of block K - 1
        self._rows: Slots | None = None  # slots of this call's tokens, from block K on
        self._mask: Any = None  # mask of block K and those behind it
        blocks: Any = self.text.get_submodule("layers")
        first = self.options.layer
        self._undo.append(tap(blocks[first - 1].self_attn, self._listen))
        for number in range(first, len(blocks)):
            self._before(blocks[number], functools.partial(self._shorten, number == first))

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        super()._begin(module, args, kwargs)
        self._pending = self._states = self._rows = self._mask = None

    def _end(self, *_: object) -> None:
        super()._end()
        self._pending = self._states = self._rows = self._mask = None

    def _listen(self, query: Tensor, key: Tensor, scale: float) -> None:
        if self._pending is not None and self._pending[0]:
            self._states = query, key, scale

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        """Return the arguments as they are, for the first blocks, and keep what block K needs."""
        cache, embeds = kwargs.get("past_key_values"), kwargs["inputs_embeds"]
        before = cache.get_seq_length() if cache is not None else 0  # length of block 0's cache, which lacks nothing
        held = past or Slots.identity(len(embeds), before, embeds.device)
        if before < held.length:
            raise UserError("the cache was cut within the prompt, which a reducer does not follow; start over")
        self._pending = units, full_mask(kwargs, before), held, before
        self._new = past
        return kwargs

    def _shorten(
        self, first: bool, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        """Hook before block K and each behind it: shorten its arguments."""
        if first and self._pending is not None:
            args, kwargs = self._decide_all(args, kwargs)
        if self._rows is None:
            return None
        rotations = tuple(self._rows.pick(part, part.ndim - 2) for part in kwargs["position_embeddings"])
        positions = kwargs.get("position_ids")
        if positions is not None:
            positions = self._rows.pick(positions, positions.ndim - 1)
        changed = {"position_embeddings": rotations, "position_ids": positions, "attention_mask": self._mask}
        return args, kwargs | changed

    def _decide_all(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Decide all reductions; returns block K's arguments with the rows of its hidden states `[b, s, d]` that are kept."""
        assert self._pending is not None
        (units, mask, held, before), hidden = self._pending, args[0]
        config: Any = self.text.config
        real = mask[:, before:].bool()
        keep = torch.ones_like(real)
        if units:
            self.seen, states = [], hidden
            hidden = hidden.clone()
            for unit, signals in zip(units, self._signals(units, states, mask.bool(), before), strict=True):
                result = self._decide(unit, signals)
                keep[unit.row, unit.columns] = False
                keep[unit.row, unit.columns[result.anchor]] = True
                hidden[unit.row, unit.columns[result.anchor]] = result.apply(states[unit.row, unit.columns])
        self._pending = self._states = None
        dropped = not keep.all()
        if not dropped and self._new is None:
            return args, kwargs
        new = Slots.of(keep, real) if dropped else Slots.identity(hidden.shape[0], hidden.shape[1], hidden.device)
        layout = held.then(before - held.length, new)
        self._new = layout if dropped else self._new
        self._rows, hidden = new, new.pick(hidden)
        self._mask = create_causal_mask(
            config=config,
            inputs_embeds=hidden,
            attention_mask=layout.mask(mask),
            past_key_values=kwargs.get("past_key_values"),
            layer_idx=self.options.layer,
        )
        return (hidden, *args[1:]), kwargs

    def _signals(self, units: list[Unit], hidden: Tensor, mask: Tensor, before: int) -> list[Signals]:
        """Signals of this stage, from block K - 1: attention, keys, and states through the final norm."""
        assert self._states is not None
        key, tokens = self._states[1], hidden.shape[1]
        saliency = self._attention(self._states, mask, before)[:, before:]
        keys = joined(key)[:, before:]
        needs = self.module.NEEDS
        states = self.text.get_submodule("norm")(hidden) if "features" in needs else None
        words = self._words(mask[:, before:]) if "query" in needs else None
        found = []
        for unit in units:
            row, columns = unit.row, unit.columns
            more = {}
            if states is not None and words is not None:
                behind = words[row] & (torch.arange(tokens, device=words.device) > columns[-1])
                more = {"features": states[row, columns], "query": states[row, behind], "query_keys": keys[row, behind]}
            found.append(
                Signals(unit.grid, saliency=saliency[row, columns], keys=keys[row, columns], heads=key.shape[1], **more)
            )
        return found

    def _attention(self, states: tuple[Tensor, Tensor, float], mask: Tensor, before: int) -> Tensor:
        """Attention `[b, before + s]` of the last real token on the full sequence, which `mask` is of."""
        query, key, scale = states
        rows = torch.arange(len(query), device=query.device)
        last = (mask[:, before:] * torch.arange(1, query.shape[2] + 1, device=mask.device)).argmax(1)
        seen = mask & (torch.arange(mask.shape[1], device=mask.device) <= before + last[:, None])
        return received(query[rows, :, last], key, scale, seen)

"""Compute the inputs of the language model for a prompt whose visual tokens are reduced, without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.models import VLM
from vlmcompress.reduction.hooks._attach import Attachment


@dataclass(frozen=True, eq=False)
class Prefill:
    """Arguments of the language model for one prompt of `n` tokens, `s` of which are left.

    embeds: `[1, s, d]`.
    mask: `[1, s]`, ones where attention may look.
    positions: `[1, s]` or, with M-RoPE, `[3 or 4, 1, s]`; those of the full prompt.
    columns: `[s]` int64, columns of the prompt's tokens that are left, ascending.
    deepstack: visual features for the first layers, in families that have them.
    """

    embeds: Tensor
    mask: Tensor
    positions: Tensor
    columns: Tensor
    deepstack: dict[str, Any]


class _Reached(Exception):
    """Raised to end a forward pass at the language model, as only its arguments are needed."""


@torch.no_grad()
def prefill(vlm: VLM, attached: Attachment, inputs: Mapping[str, Tensor]) -> Prefill:
    """Run everything before the language model on one prompt.

    Args:
        attached: the reducer on `vlm`, of any stage before the language model.
        inputs: inputs from the processor, a batch of one, with images or without.
    """
    arguments: dict[str, Any] = {}

    def reached(_module: Any, _args: tuple, kwargs: dict[str, Any]) -> None:
        layout = attached._new
        arguments.update(kwargs, columns=None if layout is None else layout.columns[0])
        raise _Reached

    # After the reducer's own hooks, which were registered before.
    hook = attached.text.register_forward_pre_hook(reached, with_kwargs=True)  # after the reducer's own
    try:
        with contextlib.suppress(_Reached):
            vlm.model(**inputs, use_cache=False)
    finally:
        hook.remove()
    embeds, columns = arguments["inputs_embeds"], arguments["columns"]
    length, device = embeds.shape[1], embeds.device
    every = torch.arange(length, device=device)
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    return Prefill(
        embeds,
        torch.ones(1, length, dtype=torch.long, device=device) if mask is None else mask,
        every[None] if positions is None else positions,
        every if columns is None else columns,
        {
            name: arguments[name]
            for name in ("visual_pos_masks", "deepstack_visual_embeds")
            if arguments.get(name) is not None
        },
    )

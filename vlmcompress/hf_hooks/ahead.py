"""Run the language model's first layers ahead on one image and the question, for reducers that need their signals.

Both engines put the image's tokens first, the question's words behind them, and start at position 0: an image has the
positions of its grid where the family has M-RoPE, else those of a row.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.hf_hooks.tap import joined, received, tap
from vlmcompress.reducers import Grid, Signals


class Enough(Exception):
    """Raised to end a forward pass when all signals are there and the rest of the model need not run."""


def positions(grid: Grid, words: int, rotated: bool, device: Any = None) -> Tensor:
    """Positions `[3, n + words]` of an image and words behind it; three equal rows unless the model has M-RoPE (`rotated`)."""
    tokens = math.prod(grid)
    if not rotated:
        return torch.arange(tokens + words, device=device).expand(3, -1)
    image = torch.stack(torch.meshgrid(*(torch.arange(side, device=device) for side in grid), indexing="ij")).flatten(1)
    text = max(grid) + torch.arange(words, device=device)
    return torch.cat([image, text.expand(3, -1)], 1)


def signals(grid: Grid, saliency: Tensor, keys: Tensor, heads: int, states: Tensor | None) -> Signals:
    """Make the signals that a reducer within the language model would get.

    Args:
        grid: grid of the image, whose tokens stand first.
        saliency: `[s]`, attention of the last token in block K - 1.
        keys: `[s, heads * d]`, the keys in block K - 1, with positions.
        states: `[s, d]`, the output of block K - 1 through the final norm, where it is read.
    """
    n = math.prod(grid)
    more: dict[str, Any] = (
        {} if states is None else {"features": states[:n], "query": states[n:], "query_keys": keys[n:]}
    )
    return Signals(grid, saliency=saliency[:n], keys=keys[:n], heads=heads, **more)


@torch.no_grad()
def run(
    text: nn.Module, rows: Tensor, query: Tensor, grid: Grid, options: Any, rotated: bool, levels: Sequence[Tensor] = ()
) -> Signals:
    """Run the first layers of transformers' language model `text`.

    Args:
        rows: `[n, d]`, the image's tokens as the language model gets them.
        query: `[q, d]`, embeddings of the question's words.
        options: options of the reducer: `layer` is K, `states` tells whether the output of block K - 1 is read.
        rotated: whether the model has M-RoPE.
        levels: `[n, d]` each, features that deepstack adds to the image's tokens behind the first blocks, in families with it.
    """
    blocks: Any = text.get_submodule("layers")
    where = positions(grid, len(query), rotated, rows.device)[:, None]
    where = where if rotated else where[0]
    image = torch.arange(len(rows) + len(query), device=rows.device)[None] < len(rows)
    deep = {"visual_pos_masks": image, "deepstack_visual_embeds": list(levels)} if levels else {}
    found: dict[str, Any] = {}

    def hear(queries: Tensor, keys: Tensor, scale: float) -> None:
        heads = keys.shape[1]
        found.update(saliency=received(queries[:, :, -1], keys, scale)[0], keys=joined(keys)[0], heads=heads)
        if not options.states:
            raise Enough

    def reached(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found["states"] = text.get_submodule("norm")(args[0])[0]
        raise Enough

    undo = [
        tap(blocks[options.layer - 1].self_attn, hear),
        blocks[options.layer].register_forward_pre_hook(reached).remove,
    ]
    try:
        with contextlib.suppress(Enough):
            text.forward(  # hooks of the model itself, a reducer's among them, are not for this
                inputs_embeds=torch.cat([rows, query])[None], position_ids=where, use_cache=False, **deep
            )
    finally:
        for each in undo:
            each()
    return signals(grid, found["saliency"], found["keys"], found["heads"], found.get("states"))

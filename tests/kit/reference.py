"""What reduced models are compared with: the full forward, in which dropped tokens are hidden from attention.

Nothing is shortened here, so positions, caches and padding are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vlmcompress.models import VLM
from vlmcompress.reduction.hooks import Reduced, attach

Stages = list[tuple[int, list[Reduced]]]
"""What is left of each image from a decoder block on, ascending."""


def logits(vlm: VLM, inputs: dict[str, Tensor], stages: Stages, stand_in: Tensor | None = None) -> Tensor:
    """`[b, s, vocab]` of the full sequence when from each stage's decoder block on only what it kept can be attended to.

    `stand_in [d]`: what the language model gets in place of the one token that is left of an image.
    """
    text: Any = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    kwargs = arguments(vlm, inputs)
    if stand_in is not None:
        kwargs |= replaced(kwargs, [unit for unit in stages[0][1] if len(unit.reduction.anchor) == 1], stand_in)
    hooks = []
    if stages[0][0] == 0:
        ((_, reductions),) = stages
        mask = hidden_mask(inputs["attention_mask"], reductions)
        masks = kwargs["attention_mask"]
        hidden = (
            {kind: _hide(layer_mask, mask) for kind, layer_mask in masks.items()} if isinstance(masks, dict) else mask
        )
        kwargs |= {"inputs_embeds": merged(kwargs["inputs_embeds"], reductions), "attention_mask": hidden}
        if kwargs.get("deepstack_visual_embeds"):
            kwargs["deepstack_visual_embeds"] = deepstack(kwargs, reductions)
    else:
        for (layer, reductions), end in zip(stages, [*(first for first, _ in stages[1:]), None], strict=True):
            square = _hide(None, hidden_mask(inputs["attention_mask"], reductions))
            hooks += [
                block.register_forward_pre_hook(_under(square), with_kwargs=True) for block in text.layers[layer:end]
            ]
    try:
        hidden = text(**kwargs).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return vlm.model.lm_head(hidden)


def _under(square: Tensor) -> Any:
    """A hook that has a block attend where `square [b, 1, s, s]` is true."""
    return lambda _, args, kwargs: (args, kwargs | {"attention_mask": square})


def shifted(stages: Stages, columns: int) -> Stages:
    """The stages of a prompt after so many other tokens."""
    return [(first, [replace(unit, columns=unit.columns + columns) for unit in units]) for first, units in stages]


def _hide(mask: Tensor | None, visible: Tensor) -> Tensor:
    """A mask `[b, 1, s, s]`, None for causal, without the columns that `visible [b, s]` leaves out. Every token sees itself."""
    square = torch.ones(visible.shape[1], visible.shape[1], dtype=torch.bool)
    return ((square.tril() if mask is None else mask) & visible.bool()[:, None, None, :]) | torch.eye(
        len(square)
    ).bool()


def replaced(kwargs: dict[str, Any], left_out: list[Reduced], row: Tensor) -> dict[str, Any]:
    """Embeddings and deepstack features in which the first token of each of these images is `row [d]`, and nothing deep."""
    embeds, where = kwargs["inputs_embeds"].clone(), kwargs.get("visual_pos_masks")
    levels = [level.clone() for level in kwargs.get("deepstack_visual_embeds") or ()]
    for unit in left_out:
        column = unit.columns[0]
        embeds[unit.row, column] = row
        for level in levels:
            level[int(where.flatten()[: unit.row * where.shape[1] + column].sum())] = 0
    return {"inputs_embeds": embeds} | ({"deepstack_visual_embeds": levels} if levels else {})


def arguments(vlm: VLM, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """What the model without a reducer hands to its language model."""
    captured: dict[str, Any] = {}
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    hook = text.register_forward_pre_hook(lambda module, args, kwargs: captured.update(kwargs), with_kwargs=True)
    vlm.model(**inputs, use_cache=False)
    hook.remove()
    return captured


def hidden_mask(mask: Tensor, units: list[Reduced]) -> Tensor:
    """The attention mask without the dropped tokens."""
    mask = mask.clone()
    for unit in units:
        dropped = torch.ones(len(unit.columns), dtype=torch.bool)
        dropped[unit.reduction.anchor] = False
        mask[unit.row, unit.columns[dropped]] = 0
    return mask


def merged(x: Tensor, units: list[Reduced]) -> Tensor:
    """`x [b, s, d]` with the weighted mean of each output's tokens where its anchor stands."""
    out = x.clone()
    for unit in units:
        target, weight, scale = unit.reduction.target, unit.reduction.weight.double(), unit.reduction.scale
        for place, anchor in enumerate(unit.reduction.anchor):
            sources = (target == place).nonzero().flatten()
            total = sum(weight[i] * x[unit.row, unit.columns[i]] for i in sources) / weight[sources].sum()
            out[unit.row, unit.columns[anchor]] = total * (1 if scale is None else scale[place].double())
    return out


def deepstack(kwargs: dict[str, Any], units: list[Reduced]) -> list[Tensor]:
    """The deepstack features with merged rows; those of dropped tokens stay, where nobody sees them."""
    where, levels = kwargs["visual_pos_masks"], []
    for level in kwargs["deepstack_visual_embeds"]:
        full = level.new_zeros(*where.shape, level.shape[-1])
        full[where] = level
        levels.append(merged(full, units)[where])
    return levels


def compare(reduced: Tensor, full: Tensor, mask: Tensor, units: list[Reduced], right: bool = False) -> None:
    """Reduced logits `[b, m, v]` equal the full ones wherever a real token is kept; to float32 where tokens were merged."""
    close = 1e-5 if any((unit.reduction.sizes > 1).any() for unit in units) else 1e-9
    kept = hidden_mask(mask, units).bool()
    assert reduced.shape[1] == kept.sum(1).max()
    for row, columns in enumerate(kept):
        count = int(columns.sum())
        got = reduced[row, :count] if right else reduced[row, reduced.shape[1] - count :]
        torch.testing.assert_close(got, full[row, columns], atol=close, rtol=close)


def logits_under(vlm, inputs, square, first=0):
    """Logits `[b, s, words]` where blocks from `first` on see what `square [b, 1, s, s]` lets them, those before everything."""
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    hooks = [block.register_forward_pre_hook(_under(square), with_kwargs=True) for block in text.layers[first:]]
    hidden = text(**arguments(vlm, inputs)).last_hidden_state
    for hook in hooks:
        hook.remove()
    return vlm.model.lm_head(hidden)


def compare_with_loop(
    vlm: VLM,
    inputs: dict[str, Tensor],
    method: str,
    options: Mapping[str, Any],
    loop: Callable[..., AbstractContextManager[list]],
) -> tuple[list[Reduced], Tensor, list]:
    """Compare merging in the encoder with a loop that does it there row by row, after the model's own placing of rows.

    Args:
        loop: puts the loop into the model while its context is open, and gives a list that it fills.

    Returns:
        The units as they were reduced, the language model's inputs `[b, s, d]` in the loop, and the loop's list.
    """
    with attach(vlm, method, options) as attached:
        reduced = vlm.model(**inputs).logits
    with loop(vlm, options) as filled:
        embeds = arguments(vlm, inputs)["inputs_embeds"]
        full = logits(vlm, inputs, attached.stages)
    compare(reduced, full, inputs["attention_mask"], attached.reduced_units)
    return attached.reduced_units, embeds, filled

"""Decoders that are not attention alone. What they carry along never sees a dropped token; those left stay where they were.

A short convolution takes the tokens that are left for neighbours, and the recurrent state of a Gated DeltaNet takes them up one
after the other: dropping a token is not hiding it. The oracle is the model on the shorter sequence, at the positions of the
full one.
"""

from __future__ import annotations

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import GREEDY, STEPS, extended
from tests.kit.reduction_data import NONE, ONE, TWO, encode, tiny
from vlmcompress.reduction.hooks import attach
from vlmcompress.utils.errors import UserError

KINDS = {"lfm2-vl": "conv", "qwen3-5": "linear_attention"}


def shorter(vlm, inputs, units):
    """Logits `[1, m, words]` of the rows that are left of one prompt, each at its old position."""
    columns = reference.hidden_mask(inputs["attention_mask"], units)[0].nonzero().flatten()
    arguments = reference.arguments(vlm, inputs)
    rows = reference.merged(arguments["inputs_embeds"], units)[:, columns]
    places = arguments.get("position_ids")
    places = columns[None] if places is None else places[..., columns]
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    return vlm.model.lm_head(text(inputs_embeds=rows, position_ids=places).last_hidden_state)


@pytest.mark.parametrize("method", ["random", "pool"])
@pytest.mark.parametrize("prompt", [ONE, TWO])
@pytest.mark.parametrize("family", KINDS)
def test_only_kept_tokens_run(family, method, prompt):
    """Equal to the model on the rows that are left, each at its old position; generation, to doing that anew each step."""
    vlm = tiny(family, mixed=True)
    assert KINDS[family] in vlm.model.config.text_config.layer_types
    inputs = encode(vlm, prompt)
    with attach(vlm, method, {"keep": 0.4} if method == "random" else {}) as attached:
        reduced = vlm.model(**inputs).logits
        out = vlm.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
    expected = shorter(vlm, extended(inputs, out.sequences[:, -STEPS:]), attached.reduced_units)
    close = {"atol": 1e-5, "rtol": 1e-5} if method == "pool" else {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(reduced, expected[:, :-STEPS], **close)
    steps = torch.stack(out.logits, 1).double()
    torch.testing.assert_close(steps, expected[:, -STEPS - 1 : -1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", KINDS)
def test_hiding_tokens_differs_from_dropping_them(family):
    """With the dropped tokens hidden from attention, the rest of the decoder still sees them."""
    vlm = tiny(family, mixed=True)
    inputs = encode(vlm, ONE)
    with attach(vlm, "uniform", {"keep": 0.4}) as attached:
        reduced = vlm.model(**inputs).logits
    square = reference.hidden_mask(inputs["attention_mask"], attached.reduced_units).bool()[:, None, None, :]
    square = square & torch.ones(square.shape[-1], square.shape[-1]).tril().bool() | torch.eye(square.shape[-1]).bool()
    arguments = reference.arguments(vlm, inputs)
    kinds = vlm.model.config.text_config.layer_types
    masks = {kind: square if kind == "full_attention" else None for kind in kinds}
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    hidden = vlm.model.lm_head(text(**arguments | {"attention_mask": masks}).last_hidden_state)
    assert (hidden[0, -1] - reduced[0, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", KINDS)
def test_a_padded_batch_is_its_prompts_one_by_one(family):
    """Padding, which is longer for prompts of which more was dropped, changes no state.

    Gated DeltaNets compute in float32, in chunks that padding moves.
    """
    vlm = tiny(family, mixed=True)
    prompts = [ONE, TWO, NONE]
    with attach(vlm, "uniform", {"keep": 0.4}):
        batch = encode(vlm, *prompts)
        if vlm.spec.images.positions == "1d":
            mask = batch["attention_mask"]
            batch["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
        together = vlm.model(**batch).logits[:, -1]
        for prompt, expected in zip(prompts, together, strict=True):
            logits = vlm.model(**encode(vlm, prompt)).logits[0, -1]
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_images_that_see_all_of_themselves_still_do():
    """Gemma 3: what is left of an image sees what is left of it, in both directions; across a window it is refused."""
    vlm = tiny("gemma3")
    inputs = encode(vlm, TWO)
    masks = []
    block = vlm.model.model.language_model.layers[0]
    hook = block.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with attach(vlm, "uniform", {"keep": 0.5}) as attached:
        vlm.model(**inputs)
    hook.remove()
    (mask,) = masks
    kept = reference.hidden_mask(inputs["attention_mask"], attached.reduced_units)[0].nonzero().flatten().tolist()
    assert mask.shape[-1] == len(kept) < inputs["input_ids"].shape[1]
    owner = {column: unit.image for unit in attached.reduced_units for column in unit.columns.tolist()}
    for i, query in enumerate(kept):
        for j, key in enumerate(kept):
            same = query in owner and owner[query] == owner.get(key)
            assert mask[0, 0, i, j] == (key <= query or same)
    vlm.model.config.text_config.sliding_window = 20
    try:
        with attach(vlm, "uniform", {"keep": 0.5}), pytest.raises(UserError, match="window of 20"):
            vlm.model(**inputs)
    finally:
        vlm.model.config.text_config.sliding_window = 500

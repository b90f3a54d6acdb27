"""Decoders that are not attention alone. Short convolutions take what is left for neighbours, at the positions it had."""

from __future__ import annotations

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import GREEDY, STEPS, extended
from tests.kit.reduction_data import ONE, TWO, encode, tiny
from vlmcompress.errors import UserError
from vlmcompress.reduction import attach


@pytest.mark.parametrize("method", ["random", "relevance"])
@pytest.mark.parametrize("prompt", [ONE, TWO])
def test_convolutions_see_the_shorter_sequence(method, prompt):
    """Equal to the model on the rows that are left, each at its old position; generation, to doing that anew each step."""
    vlm = tiny("lfm2-vl", mixed=True)
    assert "conv" in vlm.model.config.text_config.layer_types
    inputs = encode(vlm, prompt)
    with attach(vlm, method, {"keep": 0.4}) as attached:
        reduced = vlm.model(**inputs).logits
        out = vlm.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
    full = extended(inputs, out.sequences[:, -STEPS:])
    own = reference.hidden_mask(full["attention_mask"], attached.seen)[0].nonzero().flatten()
    rows = reference.merged(reference.arguments(vlm, full)["inputs_embeds"], attached.seen)[:, own]
    text = vlm.model.model.language_model
    expected = vlm.model.lm_head(text(inputs_embeds=rows, position_ids=own[None]).last_hidden_state)
    close = {"atol": 1e-5, "rtol": 1e-5} if method == "relevance" else {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(reduced, expected[:, :-STEPS], **close)
    steps = torch.stack(out.logits, 1).double()
    torch.testing.assert_close(steps, expected[:, -STEPS - 1 : -1], atol=2e-5, rtol=1e-4)


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
    kept = reference.hidden_mask(inputs["attention_mask"], attached.seen)[0].nonzero().flatten().tolist()
    assert mask.shape[-1] == len(kept) < inputs["input_ids"].shape[1]
    owner = {column: unit.image for unit in attached.seen for column in unit.columns.tolist()}
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

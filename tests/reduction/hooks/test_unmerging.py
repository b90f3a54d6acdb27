"""DyMU's virtual token unmerging, against its definition with the expansion matrix M written out."""

from __future__ import annotations

import pytest
import torch

from tests.kit import reference
from tests.kit.reduction_data import NONE, ONE, TWO, encode, tiny
from vlmcompress.reduction.hooks import attach

OPTIONS = {"thresholds": (0.3, 0.4), "vtu": True}


def slow(vlm, inputs, units) -> torch.Tensor:
    """`[b, s, vocab]`: hidden states are of the rows left; attention is f' = (M^T M)^-1 M^T attention(M x), on all tokens."""
    arguments = reference.arguments(vlm, inputs)
    text, mask = vlm.model.model.language_model, inputs["attention_mask"].bool()
    s = mask.shape[1]
    parts = []
    for row in range(len(mask)):
        group = torch.arange(s)
        for unit in units:
            if unit.row == row:
                group[unit.columns] = unit.columns[unit.reduction.anchor[unit.reduction.target]]
        rows, group = group.unique(return_inverse=True)
        expand = torch.nn.functional.one_hot(group, len(rows)).double()
        back = torch.linalg.inv(expand.T @ expand) @ expand.T
        states = arguments["inputs_embeds"][row, rows]
        allowed = (torch.ones(s, s, dtype=torch.bool).tril() & mask[row]) | torch.eye(s, dtype=torch.bool)
        position = text.rotary_emb(states, torch.arange(s)[None])
        for block in text.layers:
            full = expand @ block.input_layernorm(states)
            out = block.self_attn(full[None], position_embeddings=position, attention_mask=allowed[None, None])[0][0]
            states = states + back @ out
            states = states + block.mlp(block.post_attention_layernorm(states))
        parts.append(expand @ vlm.model.lm_head(text.norm(states)))
    return torch.stack(parts)


@pytest.mark.parametrize("family", ["llava", "llava-next"])
def test_equals_its_definition(family):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO, NONE)
    with attach(vlm, "dymu", OPTIONS) as attached:
        logits = vlm.model(**inputs).logits
        expected = slow(vlm, inputs, attached.seen)
    assert sum(len(unit.reduction.anchor) for unit in attached.seen) < 0.6 * sum(len(u.columns) for u in attached.seen)
    mask = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[mask], expected[mask], atol=1e-5, rtol=1e-5)


def test_nothing_merged_is_plain_attention():
    vlm = tiny("llava")
    inputs = encode(vlm, ONE, TWO)
    plain = vlm.model(**inputs).logits
    with attach(vlm, "dymu", {"thresholds": (1.0, 1.0), "vtu": True}):
        assert torch.equal(vlm.model(**inputs).logits, plain)


def test_decoding_equals_the_full_sequence():
    """The cache holds all tokens, so an answer's tokens find what they find without one."""
    vlm = tiny("llava")
    inputs = encode(vlm, ONE)
    with attach(vlm, "dymu", OPTIONS):
        out = vlm.model.generate(
            **inputs, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        ids = out.sequences[:, :-1]
        whole = vlm.model(**inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits[:, -4:]
    torch.testing.assert_close(torch.stack(out.logits, 1), whole.float(), atol=1e-5, rtol=1e-5)

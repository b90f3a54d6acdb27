"""`positions: compact`: the language model gets what is left of a prompt as if it had never been longer."""

from __future__ import annotations

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import DENSE, GREEDY, STEPS
from tests.kit.reduction_data import NONE, ONE, TWO, encode, tiny
from vlmcompress.reduction.choice import parse
from vlmcompress.reduction.hooks import attach
from vlmcompress.utils.errors import UserError

COMPACT = "random:0.4,positions=compact"
PLAIN = [spec.family for spec in DENSE if spec.positions == "1d" and not spec.mixed_blocks and spec.family != "gemma3"]


@pytest.mark.parametrize("family", PLAIN)
def test_equals_the_language_model_on_what_is_left(family):
    """Oracle: the rows that are kept, alone, one prompt at a time; and the full sequence again for what is generated."""
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO, NONE)
    with attach(vlm, parse(COMPACT)) as attached:
        out = vlm.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
        units = attached.seen
    assert units
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    rows = reference.arguments(vlm, inputs)["inputs_embeds"]
    kept = reference.hidden_mask(inputs["attention_mask"], units).bool()
    answers = vlm.model.get_input_embeddings()(out.sequences[:, -STEPS:])
    for number, (row, mask, answer) in enumerate(zip(rows, kept, answers, strict=True)):
        whole = torch.cat([row[mask], answer])[None]
        expected = vlm.model.lm_head(text(inputs_embeds=whole).last_hidden_state)[0, -STEPS - 1 : -1]
        logits = torch.stack([step[number] for step in out.logits])
        torch.testing.assert_close(logits.double(), expected.double(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "reducer", "message"),
    [
        ("qwen2-5-vl", COMPACT, "positions=compact: those of qwen2-5-vl are rows and columns"),
        ("llava", "fastv:0.5,positions=compact", "positions=compact is for methods that drop tokens before"),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(family, reducer, message):
    with pytest.raises(UserError, match=message):
        attach(tiny(family), parse(reducer))


def test_another_word_is_refused():
    with pytest.raises(UserError, match="positions is 'dense', should be original or compact"):
        parse("random:0.4,positions=dense")

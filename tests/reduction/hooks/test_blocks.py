"""pevlm in the models: the dense mask, written as loops, on every block; and blocks that are encoded apart from each other."""

from __future__ import annotations

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import GREEDY, INSIDE, STEPS, extended, traces
from tests.kit.reduction_data import NONE, ONE, encode, picture, tiny
from vlmcompress.models import VLM
from vlmcompress.reduction.hooks import Reduced, attach
from vlmcompress.reduction.methods import pevlm
from vlmcompress.utils.errors import UserError

FIVE = ([picture(seed) for seed in range(5)], "how many are alike?")
OPTIONS = {"frames": 2}


def parts(units: list[Reduced], row: int, s: int) -> list[int]:
    """`[s]`: 0 for the sink, the number of its block for every other token, -1 for the question."""
    images = sorted({unit.span for unit in units if unit.row == row})
    labels = []
    for column in range(s):
        number = sum(first + tokens <= column for first, tokens in images)  # images that end before
        if number == len(images):
            labels.append(-1)
        else:
            labels.append(0 if number < 1 else 1 + (number - 1) // OPTIONS["frames"])
    return labels


def masked(vlm: VLM, inputs: dict[str, torch.Tensor], units: list[Reduced], prompt: int) -> torch.Tensor:
    """Logits with the mask on every block; tokens from column `prompt` on see everything."""
    mask = inputs["attention_mask"].bool()
    rows, s = mask.shape
    square = torch.zeros(rows, 1, s, s, dtype=torch.bool)
    for row in range(rows):
        labels = [*parts(units, row, prompt), *[-1] * (s - prompt)]
        for query in range(s):
            for key in range(query + 1):
                near = labels[query] in (-1, labels[key]) or labels[key] == 0
                square[row, 0, query, key] = (near and mask[row, key]) or query == key
    return reference.logits_under(vlm, inputs, square)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name == "llava-next" else name for name in INSIDE]
)
def test_equals_dense_masked_attention(family):
    vlm = tiny(family)
    inputs = encode(vlm, FIVE, ONE, NONE)
    prompt = inputs["input_ids"].shape[1]
    with attach(vlm, "pevlm", OPTIONS) as attached:
        logits = vlm.model(**inputs).logits
        out = vlm.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
    real = inputs["attention_mask"].bool()
    expected = masked(vlm, inputs, attached.reduced_units, prompt)
    torch.testing.assert_close(logits[real], expected[real], atol=1e-9, rtol=1e-9)
    assert (logits[0, -1] - vlm.model(**inputs).logits[0, -1]).abs().max() > 1e-3
    full = masked(vlm, extended(inputs, out.sequences[:, -STEPS:]), attached.reduced_units, prompt)
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), full[:, -STEPS - 1 : -1], atol=2e-5, rtol=1e-4)
    assert all(len(unit.reduction.anchor) == len(unit.columns) for unit in attached.reduced_units)


@pytest.mark.parametrize("family", ["llava", "qwen2-5-vl"])
def test_a_block_is_as_if_encoded_alone(family):
    """Keys of a block equal those of a prompt with sink and block only, at the positions that they have in the whole."""
    vlm = tiny(family)
    inputs = encode(vlm, FIVE)
    with attach(vlm, "pevlm", OPTIONS) as attached:
        cache = vlm.model(**inputs).past_key_values
    labels = torch.tensor(parts(attached.reduced_units, 0, inputs["input_ids"].shape[1]))
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    arguments = reference.arguments(vlm, inputs)
    positions = arguments.get("position_ids")
    if positions is None:
        positions = torch.arange(len(labels))[None]
    for block in (1, 2):
        columns = ((labels == 0) | (labels == block)).nonzero().flatten()
        alone = text(
            inputs_embeds=arguments["inputs_embeds"][:, columns], position_ids=positions[..., columns], use_cache=True
        )
        for layer, other in zip(cache.layers, alone.past_key_values.layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, columns], other.keys, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("family", ["llava", "qwen3-vl"])
def test_one_block_changes_no_bit(family):
    vlm = tiny(family)
    for prompt, options in ((FIVE, {"frames": 4}), (ONE, OPTIONS), (NONE, OPTIONS)):
        inputs = encode(vlm, prompt)
        plain = vlm.model(**inputs).logits
        before = traces(vlm.model)
        with attach(vlm, "pevlm", options):
            assert torch.equal(vlm.model(**inputs).logits, plain)
        assert traces(vlm.model) == before


def test_a_second_turn_sees_the_first():
    """What a cache holds counts as sink."""
    vlm = tiny("llava")
    first, second = encode(vlm, NONE), encode(vlm, FIVE)
    length = first["input_ids"].shape[1]
    both = {name: torch.cat([first[name], second[name]], 1) for name in ("input_ids", "attention_mask")}
    with attach(vlm, "pevlm", OPTIONS):
        cache = vlm.model(**first).past_key_values
        apart = vlm.model(**second | {"attention_mask": both["attention_mask"]}, past_key_values=cache).logits
        at_once = vlm.model(**both, pixel_values=second["pixel_values"]).logits
    torch.testing.assert_close(apart, at_once[:, length:], atol=1e-9, rtol=1e-9)


def test_parts_and_attention_that_takes_no_mask():
    images = [(3, 4), (8, 4), (12, 4), (17, 4)]
    assert pevlm.PEVLM(frames=2).attention_parts(images, 30) == [7, 9, 5, 9]
    assert pevlm.PEVLM().attention_parts(images[:1], 7) == [7, 0]
    vlm = tiny("llava")
    vlm.model.set_attn_implementation("eager")
    try:
        with pytest.raises(UserError, match="attn_implementation='sdpa'"):
            attach(vlm, "pevlm")
    finally:
        vlm.model.set_attn_implementation("sdpa")

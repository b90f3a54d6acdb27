"""dyrate. The oracle: the full sequence at once, in which each generated token sees what a loop over the steps has left."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import GREEDY, INSIDE, extended, traces
from tests.kit.reduction_data import LAYERS, NONE, ONE, TWO, encode, tiny
from vlmcompress.models import VLM
from vlmcompress.reduction.hooks import Reduced, attach
from vlmcompress.utils.errors import UserError

STEPS = 6
LONGER = GREEDY | {"max_new_tokens": STEPS}
OPTIONS = {"factor": 2.5, "least": 0.1, "layer": 1}


def attention(vlm: VLM, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[b, s, s]`: what each token attends to in block 0, mean over heads."""
    vlm.model.set_attn_implementation("eager")
    try:
        text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
        return text(**reference.arguments(vlm, inputs), output_attentions=True).attentions[0].mean(1)
    finally:
        vlm.model.set_attn_implementation("sdpa")


def steps(logits: torch.Tensor, units: list[Reduced], first: int, factor: float) -> list[list[list[int]]]:
    """For each step, for each image, the indices of its tokens that are left behind it."""
    left, kept_by_step = [list(range(len(unit.columns))) for unit in units], []
    for step in range(STEPS):
        for number, unit in enumerate(units):
            scores = logits[unit.row, first + step, unit.columns].tolist()
            rate = min(1.0, max(OPTIONS["least"], factor * sum(scores[index] for index in left[number])))
            best = sorted(left[number], key=lambda index: (-scores[index], index))
            left[number] = sorted(best[: math.ceil(rate * len(unit.columns))])
        kept_by_step.append([list(columns) for columns in left])
    return kept_by_step


def recomputed(
    vlm: VLM, inputs: dict[str, torch.Tensor], units: list[Reduced], left: list, prompt: int
) -> torch.Tensor:
    """Logits of the full sequence: generated token t sees, from block 1 on, what is left behind step t."""
    mask = inputs["attention_mask"].bool()
    s = mask.shape[1]
    square = torch.ones(s, s, dtype=torch.bool).tril() & mask[:, None, None, :]
    for query in range(prompt, s):
        for unit, columns in zip(units, left[query - prompt], strict=True):
            dropped = [column for index, column in enumerate(unit.columns.tolist()) if index not in columns]
            square[unit.row, 0, query, dropped] = False
    square = square | torch.eye(s, dtype=torch.bool)
    return reference.logits_under(vlm, inputs, square, first=1)


@pytest.mark.parametrize("family", INSIDE)
def test_each_step_sees_the_tokens_that_earlier_steps_left(family):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO, NONE)
    prompt = inputs["input_ids"].shape[1]
    with attach(vlm, "uniform", {"keep": 1}) as attached:
        vlm.model(**inputs)
    first = attention(vlm, inputs)[:, -1]
    factor = 0.9 / max(first[unit.row, unit.columns].sum().item() for unit in attached.reduced_units)
    with attach(vlm, "dyrate", OPTIONS | {"factor": factor}) as attached:
        out = vlm.model.generate(**inputs, **LONGER, output_logits=True, return_dict_in_generate=True)
        units = attached.reduced_units
    longer = extended(inputs, out.sequences[:, -STEPS:])
    left = steps(attention(vlm, longer), units, prompt - 1, factor)
    counts = [sum(map(len, step)) for step in left]
    assert len(set(counts)) > 2 and counts == sorted(counts, reverse=True)
    assert [unit.reduction.anchor.tolist() for unit in units] == left[-1]
    full = recomputed(vlm, longer, units, left, prompt)
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), full[:, prompt - 1 : -1], atol=2e-5, rtol=1e-4)
    visual = torch.zeros(3, dtype=torch.long)
    for unit, columns in zip(units, left[-1], strict=True):
        visual[unit.row] -= len(unit.columns) - len(columns)
    longest = int((inputs["attention_mask"].sum(1) + visual).max()) + STEPS - 1
    lengths = [part.keys.shape[2] for part in out.past_key_values.layers]
    assert lengths == [prompt + STEPS - 1] + [longest] * (LAYERS - 1)


@pytest.mark.parametrize("family", ["llava", "qwen2-5-vl"])
def test_nothing_dropped_changes_no_token(family):
    vlm = tiny(family)
    inputs, words = encode(vlm, ONE, TWO), encode(vlm, NONE)
    generation = LONGER | {"output_logits": True, "return_dict_in_generate": True}
    plain, text = vlm.model.generate(**inputs, **generation), vlm.model.generate(**words, **generation)
    before = traces(vlm.model)
    with attach(vlm, "dyrate", OPTIONS | {"factor": 1e6}):
        assert torch.equal(torch.stack(vlm.model.generate(**inputs, **generation).logits), torch.stack(plain.logits))
    with attach(vlm, "dyrate", OPTIONS):
        assert torch.equal(
            vlm.model(**inputs).logits, vlm.model(**inputs, use_cache=False).logits
        )  # the prompt is whole
        assert torch.equal(torch.stack(vlm.model.generate(**words, **generation).logits), torch.stack(text.logits))
        assert not torch.equal(
            torch.stack(vlm.model.generate(**inputs, **generation).logits), torch.stack(plain.logits)
        )
    assert traces(vlm.model) == before


def test_a_second_turn_with_an_image_of_its_own():
    """Images of both turns are judged at each step; `seen` is of the latest."""
    vlm = tiny("llava")
    first, second = encode(vlm, ONE), encode(vlm, TWO)
    length = first["input_ids"].shape[1]
    both = {name: torch.cat([first[name], second[name]], 1) for name in ("input_ids", "attention_mask")}
    with attach(vlm, "dyrate", OPTIONS) as attached:
        cache = vlm.model(**first).past_key_values
        early = attached.reduced_units
        vlm.model(**second | {"attention_mask": both["attention_mask"]}, past_key_values=cache)
        assert {unit.row for unit in attached.reduced_units} == {0} and len(attached.reduced_units) == 2
        ((_, now), *rest) = attached._left[cache]
    assert [start for start, _ in rest] == [length, length]
    assert len(now.reduction.anchor) < len(early[0].reduction.anchor) < len(now.columns)
    assert set(now.reduction.anchor.tolist()) < set(early[0].reduction.anchor.tolist())


def test_caches_that_are_reordered_or_cut_are_refused():
    vlm = tiny("llava")
    inputs, token = encode(vlm, ONE), torch.tensor([[65]])
    with attach(vlm, "dyrate", OPTIONS):
        with pytest.raises(UserError, match="beam search"):
            vlm.model.generate(**inputs, **LONGER, num_beams=2)
        cache = vlm.model(**inputs).past_key_values
        vlm.model(input_ids=token, past_key_values=cache)
        cache.crop(-1)
        with pytest.raises(UserError, match="cut or reordered"):
            vlm.model(input_ids=token, past_key_values=cache)

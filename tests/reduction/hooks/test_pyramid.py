"""pyramiddrop in the models. The oracle: nothing is shortened; stage by stage the tokens that a loop drops are hidden."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import GREEDY, INSIDE, extended, recorded
from tests.kit.reduction_data import LAYERS, NONE, ONE, TWO, encode, tiny
from vlmcompress.models import VLM
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import Reduced, attach
from vlmcompress.reduction.methods import Reduction
from vlmcompress.reduction.support import check_config, check_reducer
from vlmcompress.utils.errors import UserError


def maps(vlm: VLM, inputs: dict[str, torch.Tensor], stages: reference.Stages) -> torch.Tensor:
    """`[blocks, s]`: what a prompt's last token attends to in each block, mean over heads, with hidden tokens."""
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    s = inputs["input_ids"].shape[1]
    masks = [torch.zeros(s, s).masked_fill(~torch.ones(s, s).tril().bool(), -torch.inf)] * LAYERS
    for first, units in stages:
        dropped = reference.hidden_mask(inputs["attention_mask"], units)[0] == 0
        hidden = masks[0].clone()
        hidden[:, dropped] = -torch.inf
        masks[first:] = [hidden.fill_diagonal_(0)] * (LAYERS - first)
    arguments = reference.arguments(vlm, inputs)
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs, blocked=mask: (args, kwargs | {"attention_mask": blocked[None, None].double()}),
            with_kwargs=True,
        )
        for block, mask in zip(text.layers, masks, strict=True)
    ]
    vlm.model.set_attn_implementation("eager")
    try:
        attentions = text(**arguments, output_attentions=True).attentions
    finally:
        vlm.model.set_attn_implementation("sdpa")
        for hook in hooks:
            hook.remove()
    return torch.stack([attention[0, :, -1].mean(0) for attention in attentions])


def slow(vlm: VLM, inputs: dict[str, torch.Tensor], units: list[Reduced], ratio: float) -> reference.Stages:
    """What is left of each image from each block on, of one prompt and as many stages as blocks."""
    left = [list(range(len(unit.columns))) for unit in units]
    stages: reference.Stages = []
    for block in range(1, LAYERS):
        scores = maps(vlm, inputs, stages)[block - 1]
        for number, unit in enumerate(units):
            unit_scores = scores[unit.columns].tolist()
            count = max(1, math.floor(ratio**block * len(unit_scores) + 0.5))
            left[number] = sorted(sorted(left[number], key=lambda index: (-unit_scores[index], index))[:count])
        stage_units = []
        for unit, kept_tokens in zip(units, left, strict=True):
            kept = Reduction.keep(torch.tensor(kept_tokens), len(unit.columns))
            stage_units.append(Reduced(**vars(unit) | {"reduction": kept}))
        stages.append((block, stage_units))
    return stages


def anchors(stages: reference.Stages) -> list[tuple[int, list[list[int]]]]:
    return [(first, [unit.reduction.anchor.tolist() for unit in units]) for first, units in stages]


@pytest.mark.parametrize("family", INSIDE)
@pytest.mark.parametrize("prompt", [ONE, TWO], ids=["one image", "two"])
def test_equals_hiding_what_a_loop_drops(family, prompt):
    vlm = tiny(family)
    inputs = encode(vlm, prompt)
    with attach(vlm, "uniform", {"keep": 1}) as attached:
        vlm.model(**inputs)
    stages = slow(vlm, inputs, attached.reduced_units, 0.5)
    with attach(vlm, "pyramiddrop", {"ratio": 0.5, "stages": LAYERS}) as attached:
        out = vlm.model(**inputs)
        assert anchors(attached.stages) == anchors(stages) and attached.stages[-1][1] is attached.reduced_units
        counts = [sum(map(len, unit_anchors)) for _, unit_anchors in anchors(stages)]
        assert counts[0] > counts[1] > 0
        full = reference.logits(vlm, inputs, stages)
        reference.compare(out.logits, full, inputs["attention_mask"], attached.reduced_units)
    s = inputs["input_ids"].shape[1]
    whole = sum(len(unit.columns) for unit in attached.reduced_units)
    assert [part.keys.shape[2] for part in out.past_key_values.layers] == [s, *(s - whole + count for count in counts)]


@pytest.mark.parametrize("family", ["llava", "qwen2-5-vl"])
def test_what_each_drop_is_told_in_a_padded_batch(family, monkeypatch):
    """The attention on what is left, as in the prompt alone: no padding and no dropped token has a part in it."""
    vlm, options = tiny(family), {"ratio": 0.5, "stages": LAYERS}
    calls = recorded(monkeypatch)
    with attach(vlm, "pyramiddrop", options):
        vlm.model(**encode(vlm, ONE, TWO, NONE))
    expected: list[list[torch.Tensor]] = [[] for _ in range(LAYERS - 1)]
    for prompt in (ONE, TWO):
        inputs = encode(vlm, prompt)
        with attach(vlm, "pyramiddrop", options) as attached:  # what it drops, `slow` drops: see above
            vlm.model(**inputs)
        left = [unit.columns for unit in attached.reduced_units]
        for turn, (_, units) in enumerate(attached.stages):
            scores = maps(vlm, inputs, attached.stages[:turn])[turn]
            expected[turn] += [scores[columns] for columns in left]
            left = [unit.columns[unit.reduction.anchor] for unit in units]
    assert len(calls) >= 3 * (LAYERS - 1) and len(calls[0].saliency) > len(calls[-1].saliency)
    saliencies = [signals.saliency.double() for signals in calls[: sum(map(len, expected))]]
    torch.testing.assert_close(saliencies, sum(expected, []), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["llava", "qwen2-5-vl", "qwen3-vl"])
def test_drops_that_begin_at_the_second(family):
    """Of 9 to 16 tokens a share of 0.97 is all; of that again one goes. Caches are continued, also by another image."""
    vlm = tiny(family)
    prompts = [(TWO[0][:1], "what?"), ONE, NONE]
    inputs = encode(vlm, *prompts)
    with attach(vlm, "pyramiddrop", {"ratio": 0.97, "stages": LAYERS}) as attached:
        out = vlm.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
    first, last = ([len(unit.reduction.anchor) for unit in units] for _, units in attached.stages)
    assert first == [len(unit.columns) for unit in attached.reduced_units] and sum(last) < sum(first)
    s, steps = inputs["input_ids"].shape[1], GREEDY["max_new_tokens"]
    longest = int(reference.hidden_mask(inputs["attention_mask"], attached.reduced_units).sum(1).max())
    lengths = [part.keys.shape[2] - steps + 1 for part in out.past_key_values.layers]
    assert lengths == [s, s, longest] and longest < s
    tokens = out.sequences[:, -steps:]
    full = reference.logits(vlm, extended(inputs, tokens), attached.stages)
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), full[:, -steps - 1 : -1], atol=2e-5, rtol=1e-4)


def test_what_a_model_has_no_room_for_is_refused_in_one_line():
    vlm = tiny("llava")
    for options, message in (
        ({}, "3 blocks do not divide into 4 stages; give stages=3 or fewer"),
        ({"keep": 0.3, "stages": 3}, "keep=0.3 is out of reach, .* choose more than 0.333$"),
    ):
        with pytest.raises(UserError, match=message) as error:
            attach(vlm, "pyramiddrop", options)
        assert "\n" not in str(error.value)
    check_reducer(vlm, parse_reducer("pyramiddrop:0.5,stages=3"))


def test_stages_that_end_before_deepstack_does_are_refused():
    vlm = tiny("qwen3-vl")
    config = vlm.model.config
    deep, config.vision_config.deepstack_visual_indexes = config.vision_config.deepstack_visual_indexes, [0, 1]
    try:
        with pytest.raises(
            UserError, match="layers before 2 still receive .*; the first stage ends before layer 1, so use"
        ):
            check_config(vlm.spec, config, parse_reducer("pyramiddrop:0.5,stages=3"))
        with pytest.raises(UserError, match="layers before 2 still receive visual features .* use layer 2 or later"):
            check_config(vlm.spec, config, parse_reducer("fastv:0.5,layer=1"))
    finally:
        config.vision_config.deepstack_visual_indexes = deep

"""The oracle: with a reducer attached, logits equal those of the full forward with the dropped tokens hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import CASES, EACH, FAMILIES, WAYS, crossed, given
from tests.kit.reduction_data import NONE, ONE, TWO, encode, tiny
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import REGISTRY

pytestmark = pytest.mark.representatives


@pytest.mark.parametrize(("family", "method"), crossed(WAYS))
def test_equals_hiding_the_dropped_tokens(family, method):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO, NONE)
    with attach(vlm, method, given(method)) as attached:
        reduced = vlm.model(**inputs).logits
    tokens = sum(len(unit.columns) for unit in attached.reduced_units)
    all_tokens = (inputs["input_ids"] == getattr(vlm.model.config, vlm.spec.image_token)).sum()
    assert tokens < all_tokens if vlm.spec.images.grid == "anyres" else tokens == all_tokens  # newlines stay
    assert sum(len(unit.reduction.anchor) for unit in attached.reduced_units) < 0.6 * tokens
    assert {unit.row for unit in attached.reduced_units} == {0, 1}
    full = reference.logits(vlm, inputs, attached.stages)
    if REGISTRY.get(method).STAGE != "encoder":  # merges before the projector; see below and test_encoder_merging
        reference.compare(reduced, full, inputs["attention_mask"], attached.reduced_units)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_sees_positions(family):
    """Closing the gaps that dropped tokens leave would be found out."""
    vlm = tiny(family)
    inputs = encode(vlm, ONE)
    with attach(vlm, "uniform", given("uniform")) as attached:
        vlm.model(**inputs)
    full = reference.logits(vlm, inputs, attached.stages)
    visible = reference.hidden_mask(inputs["attention_mask"], attached.reduced_units)[0].bool()
    arguments = reference.arguments(vlm, inputs)
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    closed = text(inputs_embeds=arguments["inputs_embeds"][:, visible]).last_hidden_state
    assert (vlm.model.lm_head(closed)[0, -1] - full[0, -1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "method"),
    [case for case in CASES if case[1] in ("random", "fastv")],
)
def test_padding_on_the_right_stays_there(family, method):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO, side="right")
    assert inputs["attention_mask"][:, 0].all() and not inputs["attention_mask"][:, -1].all()
    with attach(vlm, method, given(method)) as attached:
        reduced = vlm.model(**inputs).logits
    full = reference.logits(vlm, inputs, attached.stages)
    reference.compare(reduced, full, inputs["attention_mask"], attached.reduced_units, right=True)


def test_visionzip_equals_merging_before_the_projector():
    """The rows of the tower, merged by a loop and projected, stand at the anchors."""
    vlm = tiny("llava")
    inputs = encode(vlm, ONE, TWO)
    with attach(vlm, "visionzip", {"keep": 0.4}) as attached:
        reduced = vlm.model(**inputs).logits
    base = vlm.model.model
    states = base.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
    arguments = reference.arguments(vlm, inputs)
    assert any(unit.reduction.scale is not None and unit.reduction.scale.max() == 2 for unit in attached.reduced_units)
    for image, unit in enumerate(attached.reduced_units):
        local = replace(unit, row=0, columns=torch.arange(len(unit.columns)))
        rows = base.multi_modal_projector(reference.merged(states[image : image + 1], [local]))[0]
        anchors = unit.reduction.anchor
        arguments["inputs_embeds"][unit.row, unit.columns[anchors]] = rows[anchors]
    mask = reference.hidden_mask(inputs["attention_mask"], attached.reduced_units)
    full = vlm.model.lm_head(base.language_model(**arguments | {"attention_mask": mask}).last_hidden_state)
    reference.compare(reduced, full, inputs["attention_mask"], attached.reduced_units)


def placed(vlm, inputs: dict) -> dict:
    """With positions that begin at the first real token, as generate gives them and Qwen models count them anyway."""
    if vlm.spec.images.positions == "mrope":
        return inputs
    mask = inputs["attention_mask"]
    return inputs | {"position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)}


@pytest.mark.parametrize(("family", "method"), EACH)
def test_a_batch_is_its_prompts_one_by_one(family, method):
    vlm = tiny(family)
    prompts = [ONE, TWO, NONE]
    # GLM-4.6V's router multiplies in float32, whose last bits vary with the number of tokens, without a reducer too
    close = 1e-6 if family == "glm4v-moe" else 1e-9
    with attach(vlm, method, given(method)) as attached:
        batch = vlm.model(**placed(vlm, encode(vlm, *prompts))).logits[:, -1]
        together = attached.reduced_units
        apart = []
        for prompt, expected in zip(prompts, batch, strict=True):
            attached.reduced_units = []
            logits = vlm.model(**placed(vlm, encode(vlm, prompt))).logits[0, -1]
            apart += attached.reduced_units
            torch.testing.assert_close(logits, expected, atol=close, rtol=close)
    for left, right in zip(together, apart, strict=True):
        assert torch.equal(left.reduction.target, right.reduction.target) and left.grid == right.grid


@pytest.mark.parametrize(("family", "method"), EACH)
def test_keep_all_changes_no_bit(family, method):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO)
    plain = vlm.model(**inputs).logits
    with attach(vlm, method, given(method, 1)) as attached:
        assert torch.equal(vlm.model(**inputs).logits, plain)
    assert len(attached.reduced_units) >= 3 and all(
        len(unit.reduction.anchor) == len(unit.columns) for unit in attached.reduced_units
    )
